"""The trial of a loss before the first step: is it of the right form, and a sum rather than a mean?"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.batch import Batch
from shoal.engine import Engine
from shoal.errors import ShoalError, StepError
from shoal.modes import evaluation, random_states_kept
from shoal.task import Micro, Task, place

if TYPE_CHECKING:
    from shoal.world import World

TOLERANCE = 0.02
"""Relative to the largest of the losses compared: sums in half precision are that far off."""

Sum: TypeAlias = tuple[float, float]
"""(loss sum, count) of some samples."""


def check_loss_adds_up(
    engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None
) -> None:
    """Refuse a loss that is no (sum, count), or whose sum is a mean. Collective.

    The loss of a rank's first micro-batch is compared with those of its halves. The model runs in
    eval mode, without gradients, and random states and modes are put back, so that nothing else
    changes. What can't be cut in halves passes. Raises ShoalError on all ranks if on any.
    """
    trial = _Trial(engine, task, batch, autocast)
    with ExitStack() as aside:
        aside.enter_context(torch.no_grad())
        aside.enter_context(random_states_kept(engine.module))
        for one in engine.world.engines:  # a GAN's loss runs through the other model
            aside.enter_context(evaluation(one.module))
        _on_all_ranks(engine.world, trial.whole)
        # Running the model is collective: if one rank has to do it again, all do.
        if any(engine.world.gather(trial.halves is None)):
            _on_all_ranks(engine.world, trial.again)
    _on_all_ranks(engine.world, trial.compare)


def _on_all_ranks(world: World, action: Callable[[], None]) -> None:
    error: ShoalError | None = None
    try:
        action()
    except ShoalError as caught:
        error = caught
    except Exception:
        # The step meets it again if it is real; then its traceback is the one that helps.
        error = None
    errors = world.gather(error)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            found = f"on rank {rank}: {other.found}"
            raise type(other)(given=other.given, found=found, fix=other.fix)


def is_mean(whole: float, halves: tuple[Sum, Sum], samples: tuple[int, int]) -> bool:
    """Whether `whole` is the mean of the losses of its halves and not their sum.

    A mean weighs halves by samples or by counts. False wherever that can't be known, as for losses
    that couple samples (contrastive ones), which are neither.
    """
    (first, first_count), (second, second_count) = halves
    tolerance = TOLERANCE * max(abs(whole), abs(first), abs(second))
    if not math.isfinite(tolerance) or abs(whole - (first + second)) <= tolerance:
        return False
    for one, other in (samples, (first_count, second_count)):
        total = one + other
        if total and abs(whole - (one * first + other * second) / total) <= tolerance:
            return True
    return False


class _Trial:
    """A rank's first micro-batch, whole and in halves; a rank without an output only takes part."""

    def __init__(self, engine: Engine, task: Task, batch: Batch, autocast: torch.dtype | None) -> None:
        self._engine = engine
        self._task = task
        self._micro = batch.micros[0]
        self._seed = batch.seed
        self._autocast = autocast
        self._loss = 0.0
        self._parts: list[Micro] = []
        self.halves: list[Sum] | None = []
        """The sums of the halves; empty where there is nothing to compare, None where it takes
        another run of the model."""

    def whole(self) -> None:
        """Run the micro-batch, and cut its output in halves if it can be cut."""
        micro = self._micro
        middle = micro.samples // 2
        rows = (slice(0, middle), slice(middle, micro.samples))
        if middle:
            with suppress(ValueError):
                # On all ranks that share samples alike, speaking or not.
                self._parts = [_part(micro, some) for some in rows]
        output = self._run(micro)
        if output is None and not self._engine.speaks:
            return
        # Peers that repeat an output take the loss too: it may run another model, which is collective.
        self._loss, _ = self._reduce(micro, output)
        if not self._parts:
            return
        # Models that return their loss, or objects of their own, can't be cut and run again.
        self.halves = None
        with suppress(Exception):
            # Cutting the output is exact even where the model draws noise.
            cut = [_cut(output, some, micro.samples) for some in rows]
            self.halves = [self._reduce(*pair) for pair in zip(self._parts, cut, strict=True)]

    def again(self) -> None:
        """Run the model on the halves, or on the whole twice where only others need it."""
        outputs = [self._run(part) for part in self._parts or [self._micro] * 2]
        if self.halves is None:
            pairs = zip(self._parts, outputs, strict=True)
            # A loss may fail on halves, which is its own business.
            with suppress(Exception):
                self.halves = [self._reduce(*pair) for pair in pairs]

    def compare(self) -> None:
        """Raise StepError for a mean."""
        if not self.halves:
            return
        first, second = self.halves
        if is_mean(self._loss, (first, second), (self._parts[0].samples, self._parts[1].samples)):
            raise StepError(
                given=f"the loss function {place(self._task.loss)}: {self._loss:.6g} for "
                f"{self._micro.samples} samples",
                found=f"its halves give {first[0]:.6g} and {second[0]:.6g}: it is a mean, not a sum",
                fix="reduction='sum' in the loss function, with the number of samples as the count; "
                "where the model itself returns a mean: return output.loss * n, n",
            )

    def _run(self, part: Micro) -> Any:
        return self._engine.infer(self._task, part, self._seed, autocast=self._autocast)

    def _reduce(self, part: Micro, output: Any) -> Sum:
        beside = self._engine.beside(output, part)
        loss, count = self._task.reduce(output, beside, self._seed)
        return float(loss), float(count)


def _part(micro: Micro, rows: slice) -> Micro:
    value = _cut(micro.value, rows, micro.samples)
    return Micro(value, micro.first + rows.start, rows.stop - rows.start, micro.weight)


def _cut(value: Any, rows: slice, size: int) -> Any:
    """Some samples of tensors and arrays in tuples, lists and dicts; ValueError for anything else."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == size:
        return value[rows]
    if type(value) is dict:
        return {key: _cut(item, rows, size) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, rows, size) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_cut(item, rows, size) for item in value)
    if value is None:
        return None
    raise ValueError(f"no samples to choose in a {type(value).__name__}")
