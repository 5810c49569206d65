"""The guards of a Run, from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shoal.data import Loader
from shoal.strategies.contracts import RepeatableGradients
from shoal.telemetry.events import Events
from shoal.training.guards.options import Guards
from shoal.training.guards.recomputed_gradients import GradientGuard
from shoal.training.guards.rollback import LossGuard, Rewind
from shoal.training.guards.state_guard import StateGuard
from shoal.training.step import Step
from shoal.training.train_state import TrainState
from shoal.util.errors import StepError


class Guard(Protocol):
    """Checks for data corruption in a Run."""

    def tick(self) -> None:
        """Follow each step on all ranks. Collective."""

    def close(self) -> None:
        """End the checks, and record their number and time."""


def create_guards(
    states: Mapping[str, TrainState],
    options: Guards | None,
    events: Events,
) -> list[Guard]:
    """Return the guards against corruption of all train states.

    Each of two guards of one state has half of the budget.
    """
    found: list[Guard] = []
    if options is None:
        return found
    for name, state in states.items():
        engine, budget = state.engine, options.budget
        wanted = options.gradients and engine.world.size > 1
        if wanted and isinstance(state, Step) and isinstance(engine, RepeatableGradients):
            budget /= 2
            found.append(GradientGuard(name, state, engine, events, budget=budget))
        if options.continuity or options.replicas:
            found.append(StateGuard(name, state, options, events, budget=budget))
        if options.find_nonfinite:
            _as_step(state, "find_nonfinite=True").search_nonfinite()
    return found


def loss_guards(
    states: Mapping[str, TrainState],
    options: Guards | None,
    events: Events,
    loader: Loader,
    rewind: Rewind,
) -> list[Guard]:
    """Return the guards of losses of all train states."""
    if options is None or options.bad_steps is None:
        return []
    first = next(iter(states.values()))
    steps = {name: _as_step(state, f"bad_steps={options.bad_steps}") for name, state in states.items()}
    return [
        LossGuard(name, step, first, loader, options.bad_steps, events, rewind)
        for name, step in steps.items()
    ]


def _as_step(state: TrainState, option: str) -> Step:
    """Return `state` if it is a Step, which can skip and repeat steps; raises StepError otherwise."""
    if isinstance(state, Step):
        return state
    raise StepError(
        given=f"shoal.Run(…, guards=shoal.Guards({option})) for a custom training loop",
        found="the loop takes the steps, so that Shoal can't skip or repeat them",
        fix="use a shoal.Step, or leave this option out and catch the StepError of batch.finish(model)",
    )
