"""Means of numbers over an epoch or over the last steps, which a run saves and restores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.training.logged_values import numbers_of
from shoal.util.arguments import check_integer
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.data import Loader
    from shoal.training.train_state import TrainState

_EPOCH = 0
"""In place of the number of steps: the means over an epoch."""

_CALL = "means = run.mean(loss=result.loss), or the sum and the count of a step: accuracy=(correct, n)"


class RunningMeans:
    """Sums and counts, by window and name: of the steps in the window, or of all in the epoch."""

    def __init__(self, states: Mapping[str, TrainState], loader: Loader) -> None:
        self._states = states
        self._loader = loader
        self._epoch = -1
        self._pairs: dict[int, dict[str, list[tuple[float, float]]]] = {}
        self._added: dict[tuple[int, str], int] = {}
        """The steps to which the last values belong."""

    def add(self, values: Mapping[str, Any], window: int | None, *, ticked: bool) -> None:
        """Add values of the last step. A number counts as often as the loss of that step.

        A value with the name of a Step belongs to its steps, all others to those of the first. Skipped
        steps do not count. Raises StepError for values that are not numbers, or if the step has been
        recorded (`ticked`) or has such a value already.
        """
        counts = {n: v[1] for n, v in values.items() if isinstance(v, tuple | list) and len(v) == 2}
        sums = {name: value[0] if name in counts else value for name, value in values.items()}
        sums, counts = (numbers_of(each, call="run.mean(**{})", fix=_CALL) for each in (sums, counts))
        size, batch = _size(window), self._loader.batch
        if batch is not None and batch.epoch != self._epoch:
            self._epoch = batch.epoch
            self._pairs.pop(_EPOCH, None)
        kept = self._pairs.setdefault(size, {})
        for name, value in sums.items():
            state = self._states.get(name, next(iter(self._states.values())))
            last, key = state.last, (size, name)
            if ticked or self._added.get(key) == state.number:
                raise StepError(
                    given=f"run.mean({name}=…) at step {state.number:,}",
                    found="no step since the last run.tick(), which may have saved without the value"
                    if ticked
                    else "this step has a value already",
                    fix="call run.mean(…) once after each step, before run.tick(); run.mean() without "
                    "values returns the means",
                )
            self._added[key] = state.number
            pairs = kept.setdefault(name, [])
            if last is None or last.skipped or not math.isfinite(last.loss):
                continue
            number, count = float(value), float(counts.get(name, last.counted))
            if not (math.isfinite(number) and 0 <= count < math.inf):
                raise StepError(
                    given=f"run.mean({name}={number if name not in counts else (number, count)})",
                    found="not a finite number, or a count below 0",
                    fix=_CALL,
                )
            pairs.append((number if name in counts else number * count, count))
            if size == _EPOCH:
                pairs[:] = [_total(pairs)]
            del pairs[: -max(1, size)]

    def read(self, window: int | None) -> dict[str, float]:
        """Return the means by name; NaN where nothing has counted yet."""
        totals = {n: _total(pairs) for n, pairs in self._pairs.get(_size(window), {}).items()}
        return {name: total / count if count else math.nan for name, (total, count) in totals.items()}

    def shown(self) -> dict[str, float]:
        """Return the numbers of the progress line: the last losses, or means in their place."""
        last = {
            "loss" if name == "step" else name: state.last.loss
            for name, state in self._states.items()
            if state.last is not None
        }
        return last | self.read(None)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty before the first value."""
        pairs = {w: {n: list(each) for n, each in kept.items()} for w, kept in self._pairs.items()}
        return {"epoch": self._epoch, "pairs": pairs} if pairs else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` returned."""
        self._epoch, self._pairs = state.get("epoch", -1), state.get("pairs", {})
        self._added.clear()


def _size(window: int | None) -> int:
    """Return the number of steps in a window, or that of an epoch. Raises StepError if it has none."""
    if window is None:
        return _EPOCH
    return check_integer(StepError, "run.mean", "window", window, 1, usual=100)


def _total(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum and the count of all pairs."""
    return sum(total for total, _ in pairs), sum(count for _, count in pairs)
