"""Learning rates over a run, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shoal.errors import StepError

SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A warm-up, then a fall: the learning rate as a function of the optimizer step.

    The rate of step s, from 0, is the optimizer's own times (s + 1) / `warmup` in the first `warmup`
    steps; afterwards it falls to `floor` times its own along `shape`: "cosine" (Loshchilov and Hutter
    2017, without restarts), "linear" or "constant". Steps are optimizer steps: never ranks or
    micro-batches. `Schedule(…)(optimizer, total)` is a torch scheduler, for `Step(schedule=…)`.

        >>> rates = Schedule(shape="linear", warmup=2, floor=0.1)
        >>> [round(rates.factor(step, 10), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    shape: str = "cosine"
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise StepError(
                given=f"Schedule(shape={self.shape!r})",
                found=f"the shapes are {', '.join(SHAPES)}",
                fix="Schedule(shape='cosine', warmup=100), or any scheduler of torch's",
            )
        if self.warmup < 0 or not 0.0 <= self.floor <= 1.0:
            raise StepError(
                given=f"Schedule(warmup={self.warmup}, floor={self.floor})",
                found="a warm-up is a number of steps, and the floor a share of the rate, 0 to 1",
                fix="Schedule(warmup=100, floor=0.1)",
            )

    def factor(self, step: int, total: int) -> float:
        """What the optimizer's own rate is multiplied by at `step`, from 0, of `total`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return self.floor + (1.0 - self.floor) * SHAPES[self.shape](progress)

    def __call__(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """The schedule of a run of `total` optimizer steps."""
        return LambdaLR(optimizer, partial(_factor, schedule=self, total=total))


def _factor(step: int, *, schedule: Schedule, total: int) -> float:
    return schedule.factor(step, total)
