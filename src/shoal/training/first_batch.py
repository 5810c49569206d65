"""The trial of the first batch: a micro-batch runs as a whole and in halves, before the first step."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal._torch.dispatch import tree_map_only
from shoal._torch.modules import has_compiled_call
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import values_kept
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.batch_norm import coupled_layers
from shoal.strategies.coupling.changed_buffers import (
    OF_COUNT,
    changes,
    check_changes,
    dependence,
    gathered,
    undeclared_buffers,
)
from shoal.strategies.coupling.notice import drops
from shoal.strategies.coupling.observed import (
    Observed,
    first_difference,
    is_comparable,
)
from shoal.strategies.eval_mode import each_in_eval_mode, evaluation, random_states_kept, untouched
from shoal.strategies.random_draws.draws import constant_draws, is_registered, layouts_of
from shoal.strategies.registry import engines_of
from shoal.strategies.task import Task, place
from shoal.training.loss_check import LossSum, add_up, check_sums, counts_fit
from shoal.util.errors import ShoalError

WHOLE, HALVES, AGAIN, TOGETHER = (0,), (1, 2), (3,), (6,)
"""The runs of a trial: the micro-batch as a whole, each of its halves, the whole with the buffers that
the first run left, and the whole in which `shoal.gather` communicates."""


def check_first_batch(
    engine: Engine,
    task: Task,
    batch: Batch,
    *,
    autocast: torch.dtype | None,
    compiled: bool,
    coupling: bool,
) -> None:
    """Check the loss function and, with `coupling`, the modules of a model on a batch. Collective.

    Raises StepError if a loss is not (sum, count), if its sum is a mean, or if a buffer depends on how
    the batch is split. Prints once what else makes the results depend on it. Also finds which dimension
    of each random draw counts samples. Random states, modes, buffers and the tensors of the batch are
    restored, so that nothing else changes. Models that are compiled or split into stages are not
    searched for coupled samples. A model that is to be `compiled` may fit in memory only then: it is
    tried on four samples, if the micro-batch can be cut.
    """
    world, model = engine.world, engine.module
    trial = _Trial(engine, task, batch, autocast, 4 if compiled else sys.maxsize)
    trial.watches = (
        coupling and engine.loop is not None and not any(map(has_compiled_call, model.modules()))
    )
    trial.observes = trial.watches and (world.data_size > 1 or len(batch) > 1)
    with torch.no_grad(), ExitStack() as stack:
        for one in engines_of(world):  # a GAN's loss runs through the other model
            stack.enter_context(untouched(one.module))
            stack.enter_context(each_in_eval_mode(coupled_layers(one.module)))
        trial.divide()
        drew = trial.find_losses_and_layouts()
        trial.on_all_ranks(trial.compare_losses)
        trial.say_untried()
        if trial.watches:
            trial.check_changed_buffers()
        if trial.observes:
            trial.say_coupling(drew=drew)


class _Trial:
    """A rank's first micro-batch as a whole and in halves. A rank without outputs joins collectives.

    It runs in two modes, without a graph unless it fails then, with all layers in eval mode that couple
    samples in a known way. In training mode, the other layers run as they train. In quiet mode, dropout
    is off and draws are constants; with an engine that runs only complete steps, the model is in eval
    mode instead.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        batch: Batch,
        autocast: torch.dtype | None,
        most: int,
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
        self._changing: set[str] = set()
        """The buffers that runs copy if they are not observed: large ones would need memory twice."""
        self._observed: dict[int, Observed] = {}
        self._differs = ""
        self._quiet = True
        """Whether the last runs were quiet."""
        self._graph = False
        """Whether runs record a graph: the model or the loss computes gradients, as penalties do."""
        self._sums: list[LossSum] = []
        """The loss of each part, once it is known."""
        self._missing = False
        """True if this rank needs outputs for the halves to know their losses."""
        self._obstacle = ""
        """The reason why the losses can't be known."""

    def find_losses_and_layouts(self) -> bool:
        """Find the losses and the layouts of draws; return whether modules draw. Collective.

        If the output can't be cut in halves, the losses are those of outputs for the halves. Running
        the model is collective: if one rank has to do it, all do.
        """
        keyed, gather = is_registered(self._model), self._world.gather
        quiet = not keyed or self._engine.loop is None
        earlier = self._obstacle
        for self._graph in (False, True):
            self._obstacle = earlier
            self._run(WHOLE, quiet=quiet)
            self.on_all_ranks(self._reduce_cut_output)
            found = gather((self._missing, self._obstacle != earlier))
            missing, failed = map(any, zip(*found, strict=True))
            if not failed:
                break
        if not missing:
            self._outputs.clear()  # they may be large
        if keyed and quiet:
            self._run(WHOLE, quiet=False)
        drew = keyed and any(gather(bool(layouts_of(self._model).possible)))
        if drew or missing or self.observes:
            self._run(HALVES, quiet=not keyed)
            self._differs = self._difference(self._observed.get(0))
        if drew:
            layouts = layouts_of(self._model)
            layouts.merge(gather(layouts.possible))
            layouts.unknown.found.update(*map(set, gather(sorted(layouts.unknown.found))))
        if missing and drew:
            self._run((*WHOLE, *HALVES), quiet=True)
        if missing:
            self.on_all_ranks(self._reduce_parts)
        return drew

    def say_coupling(self, *, drew: bool) -> None:
        """Print what makes the results depend on the split, as far as runs show it. Collective.

        If outputs differ between the whole and the halves, the trial runs again in quiet mode, which
        shows coupled samples, and then with the random numbers of the modules. Modules whose output
        differs in two whole runs draw by rank, and are not compared.
        """
        gather = self._world.gather
        observed = self._observed.get(0)
        elsewhere = is_registered(self._model) and any(gather(observed and observed.draws_elsewhere))
        differs = any(gather(self._differs))
        if elsewhere:
            self._say_depends(
                "the model or inputs draws from the random generators of Python or NumPy, which are "
                "those of the rank; torch's belong to samples, and those of a parameter noise of inputs"
            )
        elif differs and (name := self._repeated_difference(quiet=True)):
            self._say_depends(
                f"the output of {name} for a sample depends on other samples of its micro-batch; "
                "shoal.Coupled makes such a layer exact, Loader(…, partners=1) mixup"
            )
        elif drew and layouts_of(self._model).unknown.found:
            pass  # the step prints the modules and the reason
        elif differs and drew and (name := self._repeated_difference(quiet=False)):
            self._say_depends(
                f"random numbers of {name}, or of a module before it, do not belong to samples; "
                "shoal.samples(dim=…) declares the dimension that counts samples"
            )

    def check_changed_buffers(self) -> None:
        """Raise StepError for buffers that depend on the split after forward passes, or print them.

        Collective.
        """
        whole = self._observed.get(0)
        self._changing = whole.changed & undeclared_buffers(self._model).keys() if whole else set()
        if not any(self._world.gather(bool(self._changing))):
            return
        if not self.observes:
            self._run(WHOLE, quiet=self._quiet)
            whole = self._observed.get(0)
        changed = changes(whole.before, whole.after) & self._changing if whole else set()
        self._run(AGAIN if self.observes else (*HALVES, *AGAIN), quiet=self._quiet)
        half, twice = self._observed.get(1), self._observed.get(AGAIN[0])
        found = dependence(whole.after, half.after, twice.after) if whole and half and twice else {}
        once = self._world.data_size > 1 and len(self._batch) == 1
        found = {
            name: why
            for name, why in found.items()
            if name in changed and not (once and why is OF_COUNT)
        }
        if len(self._batch) == 1:
            for name in self._gathered(whole.after if whole else {}, {*found}):
                found.pop(name, None)
        check_changes(self._engine, found, len(self._batch))

    def _gathered(self, alone: dict[str, Tensor], found: set[str]) -> set[str]:
        """Return the buffers of any rank that `shoal.gather` makes the same on all. Collective."""
        names = {name for part in self._world.gather([*found]) for name in part}
        if not names or self._world.virtual_ranks is not None:
            return set()
        self._run(TOGETHER, quiet=self._quiet)
        together = self._observed.get(TOGETHER[0])
        return gathered(self._world, names, alone, together.after if together else {})

    def _say_depends(self, why: str) -> None:
        self._world.print(f"shoal: results depend on how the batch is split, because {why}")

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

    def compare_losses(self) -> None:
        """Raise StepError if the loss is a mean."""
        if self._sums and not (self._can_cut or counts_fit(self._sums)):
            self._sums = []
            self._obstacle = "the counts of halves of a batch do not add up to its own"
        if self._sums:
            samples = [part.samples for part in self._parts]
            check_sums(self._task.loss, self._sums, samples, alone=self._micro.samples == 1)

    def say_untried(self) -> None:
        """Print why the loss could not be checked, if no rank could. Collective."""
        tried, obstacles = zip(*self._world.gather((bool(self._sums), self._obstacle)), strict=True)
        reason = next(filter(None, obstacles), None)
        if reason is not None and not any(tried):
            self._world.print(
                f"shoal: the loss function {place(self._task.loss)} could not be checked: {reason}. "
                "Make sure that it returns the sum of the losses of its samples, not their mean"
            )

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
                        self._model, part.samples, before, modules=self.observes, names=names
                    )
                )
            stack.enter_context(torch.set_grad_enabled(self._graph))
            self._outputs[number] = self._engine.infer(
                self._task, part, self._batch.seed, autocast=self._autocast
            )
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

    def _reduce(self, number: int, output: Any) -> LossSum:
        moved = self._engine.move_targets(output, self._parts[number])
        with values_kept(moved.value), self._calm(), torch.set_grad_enabled(self._graph):
            loss, count = self._task.reduce(output, moved, self._batch.seed)
        return float(loss), float(count)

    @property
    def _is_silent(self) -> bool:
        """Whether this rank has no output, or only some of the stages of the model."""
        output = self._outputs.get(0)
        return 0 not in self._outputs or (output is None and not self._engine.reports_loss)

    def _reduce_cut_output(self) -> None:
        """Compute the loss of the micro-batch, and those of its halves if its output can be cut."""
        if self._is_silent:
            return
        # Ranks that repeat an output compute the loss too: it may run another model, a collective.
        output, start, size = self._outputs[0], self._micro.first, self._micro.samples
        total = self._reduce(0, output)
        # The output can't be cut if the model returns its loss or a custom object.
        with suppress(Exception):
            if self._can_cut:  # exact even if the model draws random numbers
                ends = [(part.first - start, part.first - start + part.samples) for part in self._parts]
                halves = [self._reduce(n, cut(output, slice(*ends[n]), size)) for n in HALVES]
                self._sums = [total, *halves]
            else:  # other ranks may compute theirs
                for _ in HALVES:
                    self._reduce(0, output)
        self._missing = self._has_halves and not self._sums

    def _reduce_parts(self) -> None:
        """Compute the losses of the outputs for the parts, on all ranks: a loss may be collective."""
        if not self._is_silent and len(self._outputs) == 3:
            try:
                found = [self._reduce(n, self._outputs[n]) for n in (*WHOLE, *HALVES)]
                self._sums = found if self._missing else self._sums
            except Exception as error:  # a loss may fail on halves of a batch
                self._obstacle = f"half of a batch raised {type(error).__name__}: {error}"

    def _difference(self, again: Observed | None) -> str:
        """Return the first module with other rows in halves than in the whole, on this rank."""
        found = [self._observed[n] for n in (*WHOLE, *HALVES) if n in self._observed]
        if not self._can_cut or again is None or len(found) < 3:
            return ""
        first, *halves = (each.rows for each in found)
        inputs = [each.inputs for each in found]
        differs = first_difference(self._model, first, again.rows, halves, inputs)
        if differs or is_comparable(first, halves) or (self._missing and add_up(self._sums)):
            return differs
        return first_difference(self._model, first, again.rows, halves)

    def _repeated_difference(self, *, quiet: bool) -> str:
        """Return the first module that differs and does not draw by rank. Collective."""
        self._run((*WHOLE, *HALVES), quiet=quiet)
        again = self._observed.get(0)
        self._run(WHOLE, quiet=quiet)
        return self._of_any_rank(self._difference(again))

    def _of_any_rank(self, found: str) -> str:
        return next(filter(None, self._world.gather(found)), "")


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
