"""The runs of the trial of the first batch: a micro-batch as a whole and in halves."""

from __future__ import annotations

import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal._torch.dispatch import tree_map_only
from shoal.data.batch import Batch
from shoal.data.gather import gather_calls
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import values_kept
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.notice import drops
from shoal.strategies.coupling.observed import (
    Observed,
)
from shoal.strategies.eval_mode import each_in_eval_mode, evaluation, random_states_kept
from shoal.strategies.random_draws.draws import constant_draws
from shoal.strategies.registry import engines_of
from shoal.strategies.task import Task
from shoal.util.errors import ShoalError

WHOLE, HALVES, AGAIN, TOGETHER = (0,), (1, 2), (3,), (6,)
"""The runs of a trial: the micro-batch as a whole, each of its halves, the whole with the buffers that
the first run left, and the whole in which `shoal.gather` communicates."""


SECONDS = 2.0
"""The time after which a trial writes what it does."""
_TRIES = "shoal: checking loss and model on the first batch and its halves, before the first step"


class TrialRuns:
    """A rank's first micro-batch as a whole and in halves. A rank without outputs joins collectives.

    It runs in two modes, without a graph unless it fails then, with all layers in eval mode that couple
    samples in a known way. In training mode, the other layers run as they train. In quiet mode, dropout
    is off and draws are constants; with an engine that runs only complete steps, the model is in eval
    mode instead.
    """

    def __init__(
        self, engine: Engine, task: Task, batch: Batch, autocast: torch.dtype | None, most: int
    ) -> None:
        self._engine, self._task, self._batch = engine, task, batch
        self._world, self._model = engine.world, engine.module
        self._autocast = autocast
        self._micro = batch.micros[0]._replace(world=None, place=None)
        with suppress(ValueError):
            self._micro = part_of(self._micro, slice(0, min(most, self._micro.samples)))
        self._parts = [self._micro] * 3
        """The micro-batch and its two halves; if it has none, it runs in their place. They have no
        world, so that `shoal.gather` does not communicate."""
        self._has_halves = False
        self._can_cut = False
        self._outputs: dict[int, Any] = {}
        self.watches = False
        """Whether runs record the buffers, to find those that depend on the split."""
        self.observes = False
        """Whether runs are observed, to find coupled samples."""
        self._compares_inputs = False
        """Whether inputs of modules are observed too, to find the one that couples samples."""
        self._changing: set[str] = set()
        """The buffers that runs copy if they are not observed: large ones would need memory twice."""
        self._observed: dict[int, Observed] = {}
        self._quiet = True
        """Whether the last runs were quiet."""
        self._graph = False
        """Whether runs record a graph: the model or the loss computes gradients, as penalties do."""
        self._gathers = False
        """Whether `shoal.gather` was called."""
        self._obstacle = ""
        """The reason why the losses can't be known."""

    @contextmanager
    def said_if_long(self) -> Iterator[None]:
        """Write on rank 0 to stderr what the trial inside does, if it takes longer than SECONDS."""
        write = partial(print, _TRIES, file=sys.stderr, flush=True)
        timer = threading.Timer(SECONDS, write)
        timer.daemon = True
        if self._world.is_rank_zero and not self._world.simulated:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def on_all_ranks(self, action: Callable[[], None]) -> None:
        """Run a part of the trial; raise a ShoalError of any rank on all ranks. Collective."""
        error: ShoalError | None = None
        try:
            action()
        except ShoalError as caught:
            error = caught
        except Exception as caught:
            # A real error occurs again in the step, where its traceback is more useful.
            self._obstacle = f"{type(caught).__name__}: {caught}"
        errors = self._world.gather(error)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                found = f"on rank {rank}: {other.found}"
                raise type(other)(given=other.given, found=found, fix=other.fix)

    def divide(self) -> None:
        """Cut the micro-batch in halves, or collate its halves and their union again. Collective.

        All ranks cut theirs, or none: by chance, a rank's tensors may have as many rows as samples.
        """
        whole = self._parts
        self.on_all_ranks(self._cut)
        divides = self._micro.weight and self._micro.samples > 1
        if any(self._world.gather(bool(divides and not self._can_cut))):
            self._parts, self._can_cut, self._has_halves = whole, False, False
        self.on_all_ranks(self._collate_halves)

    def _cut(self) -> None:
        micro = self._micro
        if micro.weight and micro.samples > 1:
            middle = micro.samples // 2
            with suppress(ValueError):
                # On all ranks that process the same samples, with or without an output.
                cuts = (slice(0, micro.samples), slice(0, middle), slice(middle, micro.samples))
                self._parts = [part_of(micro, rows) for rows in cuts]
                self._can_cut = self._has_halves = True

    def _collate_halves(self) -> None:
        micro = self._micro
        if self._has_halves or not micro.weight:  # a padding sample
            return
        size = max(2, micro.samples)
        sizes = (size // 2, size - size // 2)
        with random_states_kept(self._model):
            halves = self._batch.again(micro.first, sizes)
        union = self._batch.again(micro.first, (size,))  # with the same random numbers
        if halves is None or union is None:
            kind = type(micro.value).__name__
            what = f"a {kind} that can't be cut in halves" if micro.samples > 1 else "one sample"
            self._obstacle = f"its batches hold {what}, and the Loader can't fetch samples again"
            return
        values = zip((*union, *halves), (0, 0, sizes[0]), (size, *sizes), strict=True)
        self._parts = [
            MicroBatch(value, micro.first + start, samples, micro.weight)
            for value, start, samples in values
        ]
        self._has_halves = True

    def _run(self, numbers: Iterable[int], *, quiet: bool) -> None:
        self._quiet = quiet
        for number in numbers:
            self.on_all_ranks(partial(self._run_part, number, quiet))

    def _run_part(self, number: int, quiet: bool) -> None:
        """Run the model on a part: the micro-batch each time if it has no halves. Collective."""
        part = self._parts[number % 3]
        if number in TOGETHER:
            part = part._replace(world=self._world)
        if self._graph:  # the model may make a part, a view of the batch, require gradients
            part = part._replace(value=tree_map_only(Tensor, torch.clone, part.value))
        self._outputs.pop(number, None)
        self._observed.pop(number, None)
        with ExitStack() as stack:
            stack.enter_context(values_kept(part.value))
            if quiet:
                stack.enter_context(self._calm())
                if self._engine.loop is not None:
                    stack.enter_context(constant_draws())
            observed = Observed()
            if self.watches:
                whole = self._observed.get(0)
                before = whole.after if whole and number in AGAIN else {}
                names = None if self.observes else self._changing
                stack.enter_context(
                    observed.running(
                        self._model,
                        part.samples,
                        before,
                        modules=self.observes,
                        inputs=self._compares_inputs,
                        names=names,
                    )
                )
            stack.enter_context(torch.set_grad_enabled(self._graph))
            calls = stack.enter_context(gather_calls())
            self._outputs[number] = self._engine.infer(
                self._task, part, self._batch.seed, autocast=self._autocast
            )
        self._gathers |= bool(calls)
        self._observed[number] = observed

    @contextmanager
    def _calm(self) -> Iterator[None]:
        """Run models without dropout inside, or in eval mode if they run only complete steps."""
        with ExitStack() as stack:
            for one in engines_of(self._world):
                layers = filter(drops, one.module.modules())
                whole = self._engine.loop is None
                stack.enter_context(evaluation(one.module) if whole else each_in_eval_mode(layers))
            yield


def part_of(micro: MicroBatch, rows: slice) -> MicroBatch:
    """Return some samples of a micro-batch; ValueError if it holds something that cannot be cut."""
    value = cut(micro.value, rows, micro.samples)
    size = rows.stop - rows.start
    first = micro.first + rows.start
    return MicroBatch(value, first, size, micro.weight, batch_first=micro.batch_first)


def cut(value: Any, rows: slice, size: int) -> Any:
    """Return some samples of tensors and arrays in tuples, lists and dicts; ValueError for others."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == size:
        return value[rows]
    if type(value) is dict or isinstance(value, UserDict):
        return type(value)({key: cut(item, rows, size) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut(item, rows, size) for item in value))
    if type(value) in (tuple, list):
        try:
            return type(value)(cut(item, rows, size) for item in value)
        except ValueError:
            if len(value) == size:  # one item for each sample, such as names of files
                return value[rows]
            raise
    if value is None:
        return None
    raise ValueError(f"no samples to choose in a {type(value).__name__}")
