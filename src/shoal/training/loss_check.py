"""The check of a loss function before the first step: that it returns (sum, count), and not a mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import values_kept
from shoal.strategies.batch_norm import coupled_layers
from shoal.strategies.contracts import Engine
from shoal.strategies.eval_mode import each_in_eval_mode, evaluation, random_states_kept, untouched
from shoal.strategies.random_draws.draws import is_registered, layouts_of
from shoal.strategies.registry import engines_of
from shoal.strategies.task import Task, place
from shoal.util.errors import ShoalError, StepError

TOLERANCE = 0.02
"""Relative to the largest of the compared losses: the error of sums in half precision."""

LossSum: TypeAlias = tuple[float, float]
"""(loss sum, count) of some samples."""


def check_loss_adds_up(
    engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None, compiled: bool = False
) -> None:
    """Raise StepError if a loss is not (sum, count), or if its sum is a mean. Collective.

    The loss of a rank's first micro-batch is compared with the losses of its halves. If the micro-batch
    can't be cut in halves, the samples of each half are collated again; a single sample is tried
    together with another sample. The model runs in eval mode, without gradients, and once more in its
    own mode, which shows which dimension of each random draw counts samples. Random states, modes, the
    model's buffers and the tensors of the batch are restored, so that nothing else changes. Rank 0
    prints a message if no rank could try the loss. A ShoalError on one rank is raised on all.

    A model that is to be `compiled` may fit in memory only then. The trial, which runs before, uses two
    samples of the micro-batch if it can be cut.
    """
    world = engine.world
    micro = _first(batch.micros[0], 2) if compiled else batch.micros[0]
    trial = _Trial(engine, task, batch, micro, autocast)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for one in engines_of(world):  # a GAN's loss runs through the other model
            stack.enter_context(untouched(one.module))
            stack.enter_context(evaluation(one.module))
        trial.on_all_ranks(trial.divide)
        trial.on_all_ranks(trial.whole)
        # Running the model is collective: if one rank has to do it again, all do.
        if any(world.gather(trial.again)):
            trial.on_all_ranks(trial.in_parts)
    if is_registered(engine.module):
        with torch.no_grad(), ExitStack() as stack:
            for one in engines_of(world):
                stack.enter_context(untouched(one.module))
                stack.enter_context(each_in_eval_mode(coupled_layers(one.module)))
            trial.on_all_ranks(trial.draw)
            layouts = layouts_of(engine.module)
            if any(world.gather(bool(layouts.possible))):
                trial.on_all_ranks(trial.draw_in_halves)
                layouts.merge(world.gather(layouts.possible))
    trial.on_all_ranks(trial.compare)
    tried, obstacles = zip(*world.gather((bool(trial.sums), trial.obstacle)), strict=True)
    reason = next(filter(None, obstacles), None)
    if reason is not None and not any(tried):
        world.print(
            f"shoal: the loss function {place(task.loss)} could not be checked: {reason}. Make sure "
            "that it returns the sum of the losses of its samples, not their mean"
        )


def is_mean(whole: float, halves: tuple[LossSum, LossSum], samples: tuple[int, int]) -> bool:
    """Return whether `whole` is the mean of the losses of its halves and not their sum.

    A mean weighs halves by samples or by counts. False if that can't be known, as for losses that
    couple samples (contrastive ones), which are neither.
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
    """A rank's first micro-batch, complete and in halves. A rank without outputs joins collectives."""

    def __init__(
        self, engine: Engine, task: Task, batch: Batch, micro: MicroBatch, autocast: torch.dtype | None
    ) -> None:
        self._engine = engine
        self._task = task
        self._batch = batch
        self._micro = micro
        self._autocast = autocast
        self._parts: list[MicroBatch] = []
        """The micro-batch and its two halves, if it has halves. They have no world, so that
        `shoal.gather` does not communicate."""
        self._output_can_be_cut = False
        self.sums: list[LossSum] = []
        """The loss of each part, once it is known."""
        self.again = False
        """True if this rank has to run the model on the parts to know their losses."""
        self.obstacle = ""
        """The reason why the losses can't be known."""

    def on_all_ranks(self, action: Callable[[], None]) -> None:
        """Run a part of the trial; raise a ShoalError of any rank on all ranks. Collective."""
        error: ShoalError | None = None
        try:
            action()
        except ShoalError as caught:
            error = caught
        except Exception as caught:
            # A real error occurs again in the step, where its traceback is more useful.
            self.obstacle = f"{type(caught).__name__}: {caught}"
        errors = self._engine.world.gather(error)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                found = f"on rank {rank}: {other.found}"
                raise type(other)(given=other.given, found=found, fix=other.fix)

    def divide(self) -> None:
        """Cut the micro-batch in halves, or collate its halves and their union again."""
        micro = self._micro
        if not micro.weight:  # a padding sample
            return
        if micro.samples > 1:
            middle = micro.samples // 2
            rows = (slice(0, middle), slice(middle, micro.samples))
            with suppress(ValueError):
                # On all ranks that process the same samples, with or without an output.
                whole = slice(0, micro.samples)
                self._parts = [part_of(micro, some) for some in (whole, *rows)]
                self._output_can_be_cut = True
                return
        size = max(2, micro.samples)
        sizes = (size // 2, size - size // 2)
        with random_states_kept(self._engine.module):
            halves = self._batch.again(micro.first, sizes)
        union = self._batch.again(micro.first, (size,))  # with the same random numbers
        if halves is None or union is None:
            kind = type(micro.value).__name__
            what = f"a {kind} that can't be cut in halves" if micro.samples > 1 else "one sample"
            self.obstacle = f"its batches hold {what}, and the Loader can't fetch samples again"
            return
        values = zip((*union, *halves), (0, 0, sizes[0]), (size, *sizes), strict=True)
        self._parts = [
            MicroBatch(value, micro.first + start, samples, micro.weight)
            for value, start, samples in values
        ]

    def whole(self) -> None:
        """Run the micro-batch, and cut its output in halves if it can be cut."""
        output = self._run(self._micro)
        if output is None and not self._engine.reports_loss:
            return
        # Ranks that repeat an output compute the loss too: it may run another model, a collective.
        total = self._reduce(self._micro, output)
        if not self._parts:
            return
        if self._output_can_be_cut:
            # The output can't be cut if the model returns its loss or a custom object.
            with suppress(Exception):
                # Cutting the output is exact even if the model draws random numbers.
                halves = [(part, self._cut_for(part, output)) for part in self._parts[1:]]
                self.sums = [total, *(self._reduce(*pair) for pair in halves)]
        self.again = not self.sums

    def in_parts(self) -> None:
        """Run the model on the parts, or as often on the micro-batch if only other ranks have parts."""
        parts = self._parts or [self._micro._replace(world=None)] * 3
        outputs = [self._run(part) for part in parts]
        if self.again:
            try:
                self.sums = [self._reduce(*pair) for pair in zip(parts, outputs, strict=True)]
            except Exception as error:  # a loss may fail on halves of a batch
                self.obstacle = f"half of a batch raised {type(error).__name__}: {error}"

    def draw(self) -> None:
        """Run the model as it trains, which shows whether it draws random numbers."""
        self._run(self._parts[0] if self._parts else self._micro._replace(world=None))

    def draw_in_halves(self) -> None:
        """Run the model as it trains on the halves, which show the layouts of its draws."""
        for part in self._parts[1:] or [self._micro._replace(world=None)] * 2:
            self._run(part)

    def compare(self) -> None:
        """Raise StepError if the loss is a mean."""
        if not self.sums:
            return
        (whole, counted), first, second = self.sums
        if not self._output_can_be_cut and not (
            math.isclose(counted, first[1] + second[1]) or counted == first[1] == second[1] == 1
        ):
            self.sums, self.obstacle = (
                [],
                "the counts of halves of a batch do not add up to its own",
            )
            return
        if self._micro.samples == 1 and first[1] == second[1] == 1:
            return  # the mean of one sample is its sum
        samples = (self._parts[1].samples, self._parts[2].samples)
        if is_mean(whole, (first, second), samples):
            raise StepError(
                given=f"the loss function {place(self._task.loss)}: {whole:.6g} for "
                f"{self._parts[0].samples} samples",
                found=f"its halves give {first[0]:.6g} and {second[0]:.6g}: it is a mean, not a sum",
                fix="use reduction='sum' in the loss function, with the number of samples as the "
                "count; if the model itself returns a mean, return output.loss * n, n",
            )

    def _cut_for(self, part: MicroBatch, output: Any) -> Any:
        start = part.first - self._micro.first
        return _cut(output, slice(start, start + part.samples), self._micro.samples)

    def _run(self, part: MicroBatch) -> Any:
        with values_kept(part.value):
            return self._engine.infer(self._task, part, self._batch.seed, autocast=self._autocast)

    def _reduce(self, part: MicroBatch, output: Any) -> LossSum:
        moved = self._engine.move_targets(output, part)
        with values_kept(moved.value):
            loss, count = self._task.reduce(output, moved, self._batch.seed)
        return float(loss), float(count)


def _first(micro: MicroBatch, samples: int) -> MicroBatch:
    """Return the first samples of a micro-batch, or all of them if it can't be cut."""
    if micro.samples > samples:
        with suppress(ValueError):
            return part_of(micro, slice(0, samples))._replace(world=micro.world)
    return micro


def part_of(micro: MicroBatch, rows: slice) -> MicroBatch:
    """Return some samples of a micro-batch; ValueError if it holds something that cannot be cut."""
    value = _cut(micro.value, rows, micro.samples)
    size = rows.stop - rows.start
    first = micro.first + rows.start
    return MicroBatch(value, first, size, micro.weight, batch_first=micro.batch_first)


def _cut(value: Any, rows: slice, size: int) -> Any:
    """Return some samples of tensors and arrays in tuples, lists and dicts; ValueError for others."""
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
