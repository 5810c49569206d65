"""The guards of a Run, from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shoal.telemetry.events import Events
from shoal.training.guards.gradient_guard import GradientGuard
from shoal.training.guards.options import Guards
from shoal.training.guards.state_guard import StateGuard
from shoal.training.step import Step
from shoal.training.train_state import TrainState


class Guard(Protocol):
    """Checks for data corruption in a Run."""

    def tick(self) -> None:
        """Follow each step on all ranks. Collective."""

    def close(self) -> None:
        """End the checks, and record their number and time."""


def create_guards(
    states: Mapping[str, TrainState], options: Guards | None, events: Events
) -> list[Guard]:
    """Return the guards of all train states. Each of two guards of one state has half of the budget."""
    found: list[Guard] = []
    if options is None:
        return found
    for name, state in states.items():
        gradients = state.engine.repeatable if options.gradients else None
        if isinstance(state, Step) and gradients is not None and state.engine.world.size > 1:
            budget = options.budget / 2
            found.append(GradientGuard(name, state, gradients, events, budget=budget))
        else:
            budget = options.budget
        found.append(StateGuard(name, state, options, events, budget=budget))
    return found
