"""Bad steps: losses that are not finite or that are spikes, and those that a run has had in a row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from shoal.data.batch import Batch
from shoal.data.skipped_batches import LeftOutBatch
from shoal.strategies.correction import Correction
from shoal.util.arguments import check_integer, is_number
from shoal.util.errors import StepError

_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class BadSteps:
    """Skip steps with a bad loss, and roll the run back after several of them in a row.

    A step is bad if its loss or its gradient norm is not finite, or if its loss is a spike: above the
    median of the last `window` good losses by more than `threshold` robust standard deviations, which
    are 1.4826 times the median absolute deviation (Hampel 1974). All ranks decide from the loss of the
    global batch. A bad step does not change parameters, optimizer state or schedule.

    After `patience` bad steps in a row, `Run.tick` restores the latest checkpoint from before them, and
    training continues without the samples of these steps (Chowdhery et al. 2022, section 5.1). With
    fp16, a step whose gradients overflow is not bad.

    Args:
        patience: Number of bad steps in a row after which the run rolls back, 1 or more. Default: 3.
        threshold: Number of robust standard deviations from which a loss is a spike, above 0.
            Default: 10.0.
        window: Number of good losses to compare with, 3 or more. Before there are as many, only losses
            that are not finite are bad. Default: 100.
        rollbacks: Number of rollbacks in a run, 0 or more. One more raises StepError. Default: 3.

    Raises:
        StepError: If an argument is out of range.

    Examples:
        >>> guards = shoal.Guards(bad_steps=shoal.BadSteps(patience=5))  # shoal.Run(…, guards=guards)
        >>> guards.bad_steps.threshold
        10.0
    """

    patience: int = 3
    threshold: float = 10.0
    window: int = 100
    rollbacks: int = 3

    def __post_init__(self) -> None:
        for name, least, usual in (("patience", 1, 3), ("window", 3, 100), ("rollbacks", 0, 3)):
            value, fix = getattr(self, name), f"shoal.BadSteps({name}={usual})"
            check_integer(StepError, "shoal.BadSteps", name, value, least, fix=fix)
        if not (is_number(self.threshold) and self.threshold > 0):
            raise StepError(
                given=f"shoal.BadSteps(threshold={self.threshold!r})",
                found="threshold is a positive number of robust standard deviations",
                fix="shoal.BadSteps(threshold=10.0)",
            )


def spike_limit(recent: Sequence[float], threshold: float) -> float:
    """Return the loss above which a step is a spike; infinite if the recent losses do not vary."""
    center = median(recent)
    deviation = _TO_DEVIATION * median(abs(each - center) for each in recent)
    return center + threshold * deviation if deviation > 0 else math.inf


class BadStep(NamedTuple):
    """A step that was skipped: the number, the batch, the loss and the reason."""

    number: int
    batch: LeftOutBatch
    loss: float
    reason: str


class BadStepRule:
    """Decides which steps of a Step are bad, and keeps those in a row.

    `good` is the number of the run's last step before the current row of bad steps; None if there was
    no good step yet. `found` are the bad steps that have not been recorded.
    """

    def __init__(self, options: BadSteps) -> None:
        self.options = options
        self.rollbacks = 0
        self.found: list[BadStep] = []
        self._begin()

    def _begin(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.options.window)
        self.in_a_row: list[LeftOutBatch] = []
        self.good: int | None = None

    def is_bad(self, number: int, batch: Batch, decided: Correction) -> bool:
        """Decide whether step `number`, on a batch, must not update the parameters."""
        reason = self._reason(decided)
        if not reason:
            self._recent.append(decided.loss)
            self.in_a_row = []
            return False
        left_out = LeftOutBatch(batch.first, batch.first + batch.size, batch.ends_epoch)
        if left_out not in self.in_a_row:  # two steps on one batch
            self.in_a_row.append(left_out)
        self.found.append(BadStep(number, left_out, decided.loss, reason))
        return True

    def explain(self, where: str) -> None:
        """Add to the last bad step the module in which it began, if known."""
        if where:
            last = self.found[-1]
            self.found[-1] = last._replace(reason=f"{last.reason}, first in {where}")

    def _reason(self, decided: Correction) -> str:
        if not decided.finite:
            what = "loss" if not math.isfinite(decided.loss) else "gradient norm"
            return f"a {what} of {decided.loss if what == 'loss' else decided.norm}"
        options, recent = self.options, self._recent
        if len(recent) < options.window:
            return ""
        limit = spike_limit(recent, options.threshold)
        if decided.loss <= limit:
            return ""
        return f"a loss of {decided.loss:.6g}, above {limit:.6g}, the limit for the last {len(recent)}"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "recent": list(self._recent),
            "in_a_row": [list(each) for each in self.in_a_row],
            "good": self.good,
            "rollbacks": self.rollbacks,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state in a checkpoint; from the beginning if it has none."""
        self._begin()
        self.rollbacks = 0
        if state is not None:
            self._recent.extend(state["recent"])
            self.in_a_row = [LeftOutBatch(*each) for each in state["in_a_row"]]
            self.good, self.rollbacks = state["good"], state["rollbacks"]
