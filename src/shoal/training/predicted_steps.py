"""The step time that `shoal plan` predicted, compared with the steps of a run while it trains.

Rank 0 compares the medians of its own steps, so that no step has a collective or an event for it. The
waiting of rank 0 includes that for slower ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from shoal.data import Loader
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.telemetry.events import Events
from shoal.telemetry.step_timer import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    FORWARD,
    OTHER,
    TRANSFER,
    UPDATE,
    WAIT,
    Spent,
)
from shoal.training.saved_plan import read_plan
from shoal.util.errors import StepError
from shoal.util.units import counted, duration

WARM_UP = CHECKED_STEPS + 5
"""Number of first steps that do additional work: checks, compilation, the counting of FLOPs."""
WINDOW = 16
"""Number of steps whose medians are compared, as in the windows of a report."""
SLOWER = 1.2
"""How many times longer than planned, or than last reported, a step takes before it is reported."""

_PARTS: Mapping[str, tuple[int, ...]] = {
    "forward and backward": (FORWARD, BACKWARD),
    "optimizer": (UPDATE,),
    "communication and waiting": (COMMUNICATION,),
    "data loading": (WAIT, TRANSFER),
    "checkpoints and evaluation": (CHECKPOINT, EVALUATION),
    "the script's own time": (OTHER,),
}
_CAUSES = {
    "forward and backward": "the device is slower than the machine of the plan, or the model, the "
    "precision or the recomputation is another one: shoal doctor, shoal bench machine",
    "optimizer": "an optimizer other than the planned Adam, or one without fused=True",
    "communication and waiting": "a slower rank, or a network slower than that of the plan: shoal "
    "report names the rank, shoal doctor measures the links",
    "data loading": "the loader can't keep up: shoal.Loader(…, num_workers=N); shoal bench data "
    "measures it",
    "checkpoints and evaluation": "saves or evaluations at almost every step",
    "the script's own time": "logging, metrics, or the forward pass of a custom training loop",
}


class PlannedSteps:
    """Compares the steps of rank 0 with the `predicted` seconds by part; warns if they are slower."""

    def __init__(self, path: str, predicted: Mapping[str, float]) -> None:
        self._path = path
        self._predicted = {part: predicted.get(part, 0.0) for part in _PARTS}
        self._planned = self._told = sum(self._predicted.values())
        self._last: Spent | None = None
        self._first = WARM_UP
        self._rows: list[tuple[int, ...]] = []
        self._sums = dict.fromkeys(_PARTS, 0.0)
        self._total = 0.0
        self._count = 0

    def begin(self, events: Events) -> None:
        """Record the prediction."""
        events.write("plan", self._fields())

    def step(self, number: int, spent: Spent) -> None:
        """Take the time of a step; warn if the latest steps are slower than planned."""
        before, self._last = self._last, spent
        if self._first:
            self._first -= 1
        elif before is not None:
            self._rows.append(tuple(now - was for now, was in zip(spent, before, strict=True)))
            if len(self._rows) == WINDOW:
                self._compare(number)

    def end(self, events: Events) -> str | None:
        """Record prediction and measurement by part; return a sentence, or None without steps."""
        if self._rows and not self._count:
            self._take()
        if not self._count:
            return None
        measured = {part: seconds / self._count for part, seconds in self._sums.items()}
        total = self._total / self._count
        more = self._excess(measured)
        part = max(more, key=lambda each: abs(more[each]))
        difference = f"{part} {100 * more[part] / self._planned:+.0f} %"
        found = {"measured": measured, "measured_seconds": total, "difference": difference}
        events.write("plan", self._fields() | found)
        return (
            f"planned {duration(self._planned, fixed=True)} per step, measured "
            f"{duration(total, fixed=True)}: {difference}"
        )

    def _compare(self, number: int) -> None:
        total, measured = self._take()
        if total <= SLOWER * self._told:
            return
        self._told = total
        more = self._excess(measured)
        part = max(more, key=lambda each: more[each])
        planned = duration(self._predicted[part]) if self._predicted[part] else "none"
        warnings.warn(
            f"step {number:,}: a step takes {duration(total)}, {total / self._planned:.2f} times the "
            f"{duration(self._planned)} planned in {self._path}. The largest difference is in {part}: "
            f"{duration(measured[part])}, planned: {planned}. Likely cause: {_CAUSES[part]}",
            stacklevel=6,  # the call of run.tick
        )

    def _take(self) -> tuple[float, dict[str, float]]:
        """Return the median seconds of the kept steps, in all and by part, and drop the steps."""
        rows, self._rows = self._rows, []
        total = median(sum(row[1:]) for row in rows) / 1e9
        measured = {
            part: median(sum(row[each] for each in own) for row in rows) / 1e9
            for part, own in _PARTS.items()
        }
        self._count += 1
        self._total += total
        for part, seconds in measured.items():
            self._sums[part] += seconds
        return total, measured

    def _excess(self, measured: Mapping[str, float]) -> dict[str, float]:
        return {part: measured[part] - seconds for part, seconds in self._predicted.items()}

    def _fields(self) -> dict[str, Any]:
        return {"path": self._path, "predicted": self._predicted, "predicted_seconds": self._planned}


def planned_steps(path: str | Path | None, loader: Loader) -> PlannedSteps | None:
    """Return the comparison with the plan in a file, on rank 0; None elsewhere. Collective.

    Raises StepError on all ranks if the file is not one of `shoal plan --json`, or the plan is for
    other ranks, another layout or another global batch.
    """
    if path is None:
        return None
    found, problem = None, None
    if loader.world.is_rank_zero:
        try:
            found = PlannedSteps(str(path), _read(path, loader))
        except StepError as error:
            problem = [error.given, error.found, error.fix]
    problem = loader.world.broadcast(problem)
    if problem is not None:
        raise StepError(given=problem[0], found=problem[1], fix=problem[2])
    return found


def _read(path: str | Path, loader: Loader) -> Mapping[str, float]:
    given, world = f"shoal.Run(…, plan={str(path)!r})", loader.world
    size = f"-n {world.size} --batch {loader.batch_size}"
    plan = read_plan(path, given, size)
    if plan.devices != world.size:
        raise StepError(
            given=given,
            found=f"the plan is for {plan.devices} devices, and this run has "
            f"{counted(world.size, 'rank')}",
            fix=f"shoal plan --model MODEL {size} --json > plan.json",
        )
    if plan.layout != str(world.layout):
        raise StepError(
            given=given,
            found=f"the plan has the layout {plan.layout}, and this run has {world.layout}",
            fix=f'shoal.init(layout="{plan.layout}")',
        )
    if plan.batch_size != loader.batch_size:
        raise StepError(
            given=given,
            found=f"the plan has a global batch of {plan.batch_size} samples, and this run has "
            f"{loader.batch_size}",
            fix=f"shoal.Loader(…, batch_size={plan.batch_size}), or plan again with --batch",
        )
    return plan.predicted
