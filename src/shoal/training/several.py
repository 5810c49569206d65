"""Several optimizers of one model, and their schedules, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.util.errors import CheckpointError, StepError


class SeveralOptimizers(Optimizer):
    """Optimizers that step one after the other, with the groups and the state of all."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Without super().__init__, which would make groups of its own.
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of each parameter."""
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    def step(self) -> None:  # type: ignore[override]
        """Take a step with each optimizer."""
        for each in self.optimizers:
            each.step()

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` before the first optimizer steps."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` after the last optimizer has stepped."""
        return self.optimizers[-1].register_step_post_hook(hook)


class SeveralSchedules(LRScheduler):
    """Schedules that step together, under the same name as those of a ChainedScheduler."""

    def __init__(self, schedules: Sequence[LRScheduler]) -> None:
        self._schedulers = tuple(schedules)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The number of steps of the first schedule."""
        return self._schedulers[0].last_epoch

    def step(self) -> None:  # type: ignore[override]
        """Step each schedule."""
        for each in self._schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"schedules": [each.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all."""
        for each, state in zip(self._schedulers, state_dict["schedules"], strict=True):
            each.load_state_dict(state)


def one_optimizer(given: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return the optimizer, or the optimizers as one."""
    if not isinstance(given, list | tuple):
        return given  # type: ignore[return-value]
    if not given:
        raise StepError(
            given="an empty list of optimizers",
            found="no optimizer, so no parameter would change",
            fix="shoal.Step(model, [first, second], task)",
        )
    return given[0] if len(given) == 1 else SeveralOptimizers(given)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of which `optimizer` consists: itself, or several."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def kind_of(given: object) -> str:
    """Return the class of an optimizer or a schedule, or the classes of several, as text."""
    if isinstance(given, SeveralSchedules):
        return " and ".join(map(kind_of, given._schedulers))
    parts = parts_of(given) if isinstance(given, Optimizer) else (given,)
    return " and ".join(type(each).__name__ for each in parts)


def check_number(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a saved state is not of as many schedules."""
    here = len(schedule._schedulers) if isinstance(schedule, SeveralSchedules) else 1
    saved = len(state.get("schedules", "1"))
    if here != saved:
        raise CheckpointError(
            given=f"a Step with {here} schedule(s)",
            found=f"a checkpoint with {saved}",
            fix="use the same schedule= as the run that wrote the checkpoint, or start a new run: "
            "shoal.Run('runs/b', …)",
        )
