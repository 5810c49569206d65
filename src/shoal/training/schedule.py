"""Learning rates over a run, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shoal.util.errors import StepError

SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A warm-up followed by a decay: the learning rate as a function of the optimizer step.

    `warmup` counts the optimizer steps of the warm-up; `warmup_ratio` gives it as a fraction of all
    steps instead, rounded up. The rate of step s, counted from 0, is the optimizer's own times
    (s + 1) / `warmup` during the warm-up; then it falls to `floor` times the optimizer's own along
    `shape`: "cosine" (Loshchilov and Hutter 2017, without restarts), "linear" or "constant". Steps are
    optimizer steps, never ranks or micro-batches. `LRSchedule(…)(optimizer, total)` returns a torch
    scheduler for `Step(schedule=…)`.

    Raises StepError for an unknown shape, a `warmup` that is not a whole number of steps, a fraction
    outside 0 to 1, and where both `warmup` and `warmup_ratio` are given.

        >>> rates = Schedule(shape="linear", warmup=2, floor=0.1)
        >>> [round(rates.factor(step, 10), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
        >>> Schedule(warmup_ratio=0.2).factor(0, 10)
        0.5
    """

    shape: str = "cosine"
    warmup: int = 0
    warmup_ratio: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise StepError(
                given=f"Schedule(shape={self.shape!r})",
                found=f"the shapes are {', '.join(SHAPES)}",
                fix="Schedule(shape='cosine', warmup=100), or any scheduler of torch's",
            )
        if not _is_count(self.warmup):
            ratio = self.warmup if _is_fraction(self.warmup) else 0.1
            raise StepError(
                given=f"Schedule(warmup={self.warmup!r})",
                found="warmup is a number of optimizer steps: an integer, 0 or more",
                fix=f"Schedule(warmup=100), or a fraction of all steps: Schedule(warmup_ratio={ratio})",
            )
        for name, value in (("warmup_ratio", self.warmup_ratio), ("floor", self.floor)):
            if not _is_fraction(value):
                of = "all optimizer steps" if name == "warmup_ratio" else "the learning rate"
                raise StepError(
                    given=f"Schedule({name}={value!r})",
                    found=f"{name} is a fraction of {of}: a number from 0 to 1",
                    fix=f"Schedule({name}=0.1)"
                    + ("; a number of steps: Schedule(warmup=100)" if of.startswith("all") else ""),
                )
        if self.warmup and self.warmup_ratio:
            raise StepError(
                given=f"Schedule(warmup={self.warmup}, warmup_ratio={self.warmup_ratio})",
                found="both give the length of the warm-up",
                fix=f"one of them: Schedule(warmup={self.warmup})",
            )

    def factor(self, step: int, total: int) -> float:
        """What the optimizer's own rate is multiplied by at `step`, from 0, of `total`."""
        # The product of 0.07 and 100 is above 7, and would be rounded up to 8.
        warmup = self.warmup or math.ceil(round(self.warmup_ratio * total, 6))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.floor + (1.0 - self.floor) * SHAPES[self.shape](progress)

    def __call__(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """The schedule of a run of `total` optimizer steps."""
        return LambdaLR(optimizer, partial(_factor, schedule=self, total=total))


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _factor(step: int, *, schedule: LRSchedule, total: int) -> float:
    return schedule.factor(step, total)
