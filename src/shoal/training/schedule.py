"""Learning rates over a run, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)

from shoal._torch.optimizers import schedulers_in
from shoal.util.arguments import check_choice, integer_like, is_integer, is_number
from shoal.util.errors import StepError

DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}

_OF_EITHER = (StepLR, MultiStepLR, ExponentialLR, CosineAnnealingLR, CosineAnnealingWarmRestarts)
"""Schedulers that scripts step after each epoch about as often as after each optimizer step."""


def steps_by_epoch(schedule: LRScheduler | None, interval: str | None) -> bool:
    """Return whether a schedule steps once per epoch, given the `schedule_interval` of a Step.

    Raises StepError if it is missing where either is usual.
    """
    check_choice(StepError, "shoal.Step", "schedule_interval", interval, (None, "step", "epoch"))
    for each in schedulers_in(schedule):
        if interval is None and isinstance(each, _OF_EITHER):
            raise StepError(
                given=f"schedule={type(each).__name__} without schedule_interval",
                found="its arguments may count epochs or optimizer steps",
                fix="pass schedule_interval='epoch' to step it at the end of each epoch, or "
                "schedule_interval='step' to step it after each optimizer step",
            )
    return interval == "epoch"


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A warm-up followed by a decay: the learning rate as a function of the optimizer step.

    During a warm-up of w steps, the learning rate of step s, counted from 0, is the optimizer's
    learning rate times (s + 1) / w. Then it falls to `min_ratio` times the optimizer's learning rate.
    `LRSchedule(…)(optimizer, total)` returns a torch scheduler for `Step(schedule=…)`;
    `shoal.train(schedule=…)` takes the LRSchedule itself.

    Args:
        decay: Shape of the decay: "cosine" (Loshchilov and Hutter 2017, without restarts), "linear" or
            "constant". Default: "cosine".
        warmup_steps: Length of the warm-up in optimizer steps, an integer, 0 or more. Default: 0.
        warmup_ratio: Length of the warm-up as a fraction of all optimizer steps, from 0 to 1. The
            number of steps is rounded up. Use it instead of `warmup_steps`. Default: 0.0.
        min_ratio: Final learning rate as a fraction of the optimizer's, from 0 to 1. Default: 0.0.

    Raises:
        StepError: If an argument is out of range, or `warmup_steps` and `warmup_ratio` are both given.

    Examples:
        >>> rates = LRSchedule(decay="linear", warmup_steps=2, min_ratio=0.1)
        >>> [round(rates.factor(step, 10), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
        >>> LRSchedule(warmup_ratio=0.2).factor(0, 10)
        0.5
    """

    decay: str = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_choice(StepError, "shoal.LRSchedule", "decay", self.decay, DECAYS)
        if not is_integer(self.warmup_steps):
            ratio = self.warmup_steps if _is_fraction(self.warmup_steps) else 0.1
            raise StepError(
                given=f"LRSchedule(warmup_steps={self.warmup_steps!r})",
                found="warmup_steps is a number of optimizer steps: an integer, 0 or more",
                fix=f"use LRSchedule(warmup_steps={integer_like(self.warmup_steps, 100)}), or a "
                "fraction of all steps: "
                f"LRSchedule(warmup_ratio={ratio})",
            )
        for name, value in (("warmup_ratio", self.warmup_ratio), ("min_ratio", self.min_ratio)):
            if not _is_fraction(value):
                of = "all optimizer steps" if name == "warmup_ratio" else "the learning rate"
                raise StepError(
                    given=f"LRSchedule({name}={value!r})",
                    found=f"{name} is a fraction of {of}: a number from 0 to 1",
                    fix=f"LRSchedule({name}=0.1)"
                    + (
                        "; a number of steps: LRSchedule(warmup_steps=100)"
                        if of.startswith("all")
                        else ""
                    ),
                )
        if self.warmup_steps and self.warmup_ratio:
            raise StepError(
                given=f"LRSchedule(warmup_steps={self.warmup_steps}, warmup_ratio={self.warmup_ratio})",
                found="both give the length of the warm-up",
                fix=f"use one of them: LRSchedule(warmup_steps={self.warmup_steps})",
            )

    def factor(self, step: int, total: int) -> float:
        """Return the factor on the optimizer's learning rate at an optimizer step.

        Args:
            step: Optimizer step, from 0.
            total: Number of optimizer steps of the run.

        Returns:
            A number from 0 to 1.
        """
        # The product of 0.07 and 100 is above 7, and would be rounded up to 8.
        warmup = self.warmup_steps or math.ceil(round(self.warmup_ratio * total, 6))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.min_ratio + (1.0 - self.min_ratio) * DECAYS[self.decay](progress)

    def __call__(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """Return the schedule of a run as a torch scheduler.

        Args:
            optimizer: Optimizer whose learning rates change.
            total: Number of optimizer steps of the run, an integer, 0 or more.

        Returns:
            A scheduler, stepped once per optimizer step.

        Raises:
            StepError: If `optimizer` is not a torch.optim.Optimizer, or `total` is not an integer, 0 or
                more.
        """
        fix = "LRSchedule(…)(optimizer, len(loader) * epochs)"
        if not isinstance(optimizer, Optimizer):
            raise StepError(
                given=f"LRSchedule(…)({type(optimizer).__name__}, …)",
                found="it is not a torch.optim.Optimizer",
                fix=fix,
            )
        if not is_integer(total):
            raise StepError(
                given=f"LRSchedule(…)(optimizer, {total!r})",
                found="the total is a number of optimizer steps: an integer, 0 or more",
                fix=fix,
            )
        return LRScheduleRates(optimizer, partial(_factor, schedule=self, total=total))


class LRScheduleRates(LambdaLR):
    """The schedule of all groups of an optimizer, also of those that are added or removed later."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups that the optimizer has now."""
        self._follow_groups()
        return super().get_lr()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the groups of the optimizer have been loaded before."""
        self._follow_groups()
        super().load_state_dict(state_dict)

    def _follow_groups(self) -> None:
        groups = self.optimizer.param_groups
        self.base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in groups]
        self.lr_lambdas = self.lr_lambdas[:1] * len(groups)


def _is_fraction(value: object) -> bool:
    return is_number(value) and 0.0 <= value <= 1.0


def _factor(step: int, *, schedule: LRSchedule, total: int) -> float:
    return schedule.factor(step, total)


_stepped: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
"""How often Steps have stepped a schedule, which several Steps may share."""


def step_schedule(schedule: LRScheduler) -> None:
    """Step the schedule of a Step."""
    schedule.step()
    _stepped[schedule] = _stepped.get(schedule, 0) + 1


def script_steps(schedule: LRScheduler | None) -> int | None:
    """Return how many steps of a schedule no Step has taken; None if it does not count its steps."""
    last = getattr(schedule, "last_epoch", None)  # ChainedScheduler has none
    return None if schedule is None or last is None else last - _stepped.get(schedule, 0)


def check_script_steps(schedule: LRScheduler | None, before: int | None) -> None:
    """Raise StepError if the script has stepped the schedule of a Step too, since `before`."""
    now = script_steps(schedule)
    if now is not None and before is not None and now > before:
        raise StepError(
            given=f"shoal.Step(…, schedule={type(schedule).__name__}) and schedule.step()",
            found="the Step steps the schedule itself; the script has called schedule.step() "
            f"{now - before} more times",
            fix="remove schedule.step() from the script, or schedule= from the Step",
        )
