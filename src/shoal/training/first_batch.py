"""The trial of the first batch: a micro-batch runs as a whole and in halves, before the first step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from shoal._torch.dispatch import tree_map_only
from shoal._torch.modules import has_compiled_call
from shoal.data.batch import Batch
from shoal.data.gather import gather_calls
from shoal.data.micro import MicroBatch
from shoal.distributed.to_device import values_kept
from shoal.strategies.contracts import Engine
from shoal.strategies.coupling.batch_norm import coupled_layers, is_covered
from shoal.strategies.coupling.changed_buffers import (
    OF_COUNT,
    changes,
    check_changes,
    dependence,
    gathered,
    undeclared_buffers,
)
from shoal.strategies.coupling.observed import (
    Observed,
    first_difference,
    is_comparable,
)
from shoal.strategies.eval_mode import each_in_eval_mode, untouched
from shoal.strategies.random_draws.draws import is_registered, layouts_of, task_layouts
from shoal.strategies.registry import engines_of
from shoal.strategies.task import Task, place
from shoal.training.loss_check import (
    EQUAL,
    TOLERANCE,
    LossSum,
    NotSum,
    add_up,
    check_sums,
    counts_fit,
    excess,
    is_sum,
)
from shoal.training.trial_runs import AGAIN, HALVES, TOGETHER, WHOLE, TrialRuns, cut, part_of

ROUNDED, EXACT = 1e-6, 1e-7
"""Relative to the largest of the compared losses: the error of sums in single and double precision."""


def check_first_batch(
    engine: Engine,
    task: Task,
    batch: Batch,
    *,
    autocast: torch.dtype | None,
    compiled: bool,
    coupling: bool,
) -> str:
    """Check the loss function and, with `coupling`, the modules of a model on a batch. Collective.

    Returns the line to print once the step has succeeded if the loss could not be checked: the reason
    may be an error that the step raises too.

    Raises StepError if a loss is not (sum, count), if its sum is a mean or depends on how the batch is
    split, or if a buffer does. Prints once what else makes the results depend on it. Also finds which
    dimension of each random draw counts samples. Random states, modes, buffers and the tensors of the
    batch are restored, so that nothing else changes. Models that are compiled or split into stages are
    not searched for coupled samples. A model that is to be `compiled` may fit in memory only then: it
    is tried on four samples, if the micro-batch can be cut.
    """
    world, model = engine.world, engine.module
    trial = _Trial(engine, task, batch, autocast, 4 if compiled else sys.maxsize)
    trial.watches = (
        coupling and engine.loop is not None and not any(map(has_compiled_call, model.modules()))
    )
    trial.observes = trial.watches and (world.data_size > 1 or len(batch) > 1)
    with torch.no_grad(), trial.said_if_long(), ExitStack() as stack:
        for one in engines_of(world):  # a GAN's loss runs through the other model
            stack.enter_context(untouched(one.module))
            stack.enter_context(each_in_eval_mode(coupled_layers(one.module)))
        trial.divide()
        drew = trial.find_losses_and_layouts()
        trial.on_all_ranks(trial.compare_losses)
        untried = trial.untried()
        if trial.watches:
            trial.check_changed_buffers()
        said = trial.observes and trial.say_coupling(drew=drew)
        trial.check_split_loss(said=said)
    return untried


class _Trial(TrialRuns):
    """The conclusions from the runs of a trial."""

    def __init__(
        self, engine: Engine, task: Task, batch: Batch, autocast: torch.dtype | None, most: int
    ) -> None:
        super().__init__(engine, task, batch, autocast, most)
        self._differs = ""
        self._sums: list[LossSum] = []
        """The loss of each part, once it is known."""
        self._not_sum: NotSum | None = None
        """The losses that do not add up, unless each run has others."""
        self._missing = False
        """True if this rank needs outputs for the halves to know their losses."""

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
            found = gather(
                (self._missing, self._obstacle != earlier, not self._adds_up(self._sums, ROUNDED))
            )
            missing, failed, odd = map(any, zip(*found, strict=True))
            if not failed:
                break
        if odd:
            self.on_all_ranks(self._try_cut_output_again)
        if not missing:
            self._outputs.clear()  # they may be large
        if keyed and quiet:
            self._run(WHOLE, quiet=False)
        layouts = [layouts_of(self._model), task_layouts(self._task)] if keyed else []
        drew = any(gather(any(each.possible for each in layouts)))
        if drew or missing or self.observes:
            self._run(HALVES, quiet=not keyed)
            self._differs = self._difference(self._observed.get(0))
        for each in layouts if drew else ():
            each.merge(gather(each.possible))
            each.unknown.found.update(*map(set, gather(sorted(each.unknown.found))))
        if missing:
            self.on_all_ranks(self._reduce_parts)
            if drew and self._odd_anywhere():  # some random numbers may not belong to samples
                self._run((*WHOLE, *HALVES), quiet=True)
                self.on_all_ranks(self._reduce_parts)
            if self._odd_anywhere():
                self._run(WHOLE, quiet=drew or not keyed)
                self.on_all_ranks(self._try_whole_again)
        return drew

    def say_coupling(self, *, drew: bool) -> bool:
        """Print what makes the results depend on the split; return whether anything does. Collective.

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
        elif drew and (layouts_of(self._model).unknown.found or task_layouts(self._task).unknown.found):
            return True  # the step prints the modules and the reason
        elif differs and drew and (name := self._repeated_difference(quiet=False)):
            self._say_depends(
                f"random numbers of {name}, or of a module before it, do not belong to samples; "
                "shoal.samples(dim=…) declares the dimension that counts samples"
            )
        else:
            return False
        return True

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

    def compare_losses(self) -> None:
        """Raise StepError if the loss is a mean."""
        if self._sums and not (self._can_cut or counts_fit(self._sums)):
            self._sums = []
            self._obstacle = "the counts of halves of a batch do not add up to its own"
        if self._sums and not self._task.depends_on_batch:
            samples = [part.samples for part in self._parts]
            check_sums(self._task.loss, self._sums, samples, alone=self._micro.samples == 1)

    def check_split_loss(self, *, said: bool) -> None:
        """Raise StepError for losses that do not add up, or print them. Collective.

        They are printed if nothing is split, or if the halves were fetched again: their padding may
        differ. Losses that a model returns depend on what was `said` of its modules.
        """
        found, loss = self._not_sum, self._task.loss
        splits = self._world.data_size > 1 or len(self._batch) > 1
        line = found.line(loss, splits=splits) if found else ""
        gathers, lines = zip(*self._world.gather((self._gathers, line)), strict=True)
        if any(gathers) or not any(lines):
            return

        def check() -> None:
            raises = splits and self._can_cut and not (said and self._missing)
            if found and found.term is None and raises:
                raise found.error(loss)

        self.on_all_ranks(check)
        self._world.print(f"shoal: {next(filter(None, lines))}")

    def untried(self) -> str:
        """Return a line on why the loss could not be checked, if no rank could. Collective."""
        tried, obstacles = zip(*self._world.gather((bool(self._sums), self._obstacle)), strict=True)
        reason = next(filter(None, obstacles), None)
        if reason is None or any(tried):
            return ""
        return (
            f"shoal: the loss function {place(self._task.loss)} could not be checked: "
            f"{reason.rstrip('.')}. "
            "Make sure that it returns the sum of the losses of its samples, not their mean"
        )

    def _reduce(self, output: Any, part: MicroBatch, *, double: bool = False) -> LossSum:
        moved = self._engine.move_targets(output, part)
        if double:
            output, value = tree_map_only(Tensor, _in_double, (output, moved.value))
            moved = moved._replace(value=value)
        with values_kept(moved.value), self._calm(), torch.set_grad_enabled(self._graph):
            with gather_calls() as calls:
                loss, count = self._task.reduce(output, moved, self._batch.seed)
            self._gathers |= bool(calls)
        return float(loss), float(count)

    @property
    def _is_silent(self) -> bool:
        """Whether this rank has no output, or only some of the stages of the model."""
        output = self._outputs.get(0)
        return 0 not in self._outputs or (output is None and not self._engine.reports_loss)

    def _cut_output(self, middle: int) -> list[tuple[Any, MicroBatch]]:
        """Return the output and the micro-batch before and after a sample; empty if they can't be cut.

        The output can't be cut if the model returns its loss or a custom object.
        """
        output, part, size = self._outputs[0], self._parts[0], self._micro.samples
        with suppress(Exception):
            if self._can_cut:
                rows = (slice(0, middle), slice(middle, size))
                return [(cut(output, each, size), part_of(part, each)) for each in rows]
        return []

    def _reduce_cut(self, middle: int, *, double: bool = False) -> list[LossSum]:
        """Return the losses of the micro-batch and of its parts before and after a sample.

        All ranks with an output reduce as often, and those that can't cut it the whole: a loss may be
        collective.
        """
        whole = (self._outputs[0], self._parts[0])
        parts = (whole, *(self._cut_output(middle) or [whole] * 2))
        return [self._reduce(*each, double=double) for each in parts]

    def _reduce_cut_output(self) -> None:
        """Compute the loss of the micro-batch, and those of its halves if its output can be cut."""
        if self._is_silent:
            return
        middle = self._micro.samples // 2
        is_cut = bool(self._cut_output(middle))
        sums: list[LossSum] = []
        with suppress(Exception) if is_cut else nullcontext():
            sums = self._reduce_cut(middle)  # exact even if the model draws random numbers
        if is_cut and not sums:
            self._reduce(self._outputs[0], self._parts[0])  # a loss may fail on halves of a batch
        self._sums = sums if is_cut else []
        self._missing = self._has_halves and not self._sums

    def _odd_anywhere(self) -> bool:
        """Return whether the losses of a rank do not add up. Collective."""
        return any(self._world.gather(not self._adds_up(self._sums, self._tolerance)))

    def _adds_up(self, sums: Sequence[LossSum], tolerance: float) -> bool:
        """Return whether losses may be what they are, the sums over samples."""
        return not sums or self._task.depends_on_batch or is_sum(sums, tolerance)

    def _try_cut_output_again(self) -> None:
        """Find out whether losses of a cut output do not add up by rounding or chance."""
        if self._is_silent:
            return
        size, term = self._micro.samples, None
        try:
            adds_up = self._adds_up(self._reduce_cut(size // 2, double=True), EXACT)
        except Exception:  # weights of classes, for example, remain in single precision
            adds_up = self._adds_up(self._sums, self._tolerance)
        again = self._reduce(self._outputs[0], self._parts[0])
        with suppress(Exception):
            other, _ = excess(self._reduce_cut(size // 4 or size - 1))
            loss, count = excess(self._sums)
            if size > 2 and not count and math.isclose(other, loss, rel_tol=0.01):
                term = other
        if self._sums and not adds_up and _same(again, self._sums[0]):
            self._not_sum = NotSum(self._sums, size, term)

    def _try_whole_again(self) -> None:
        """Find out whether losses of runs that do not add up are a matter of chance.

        Not with declared layers that couple samples: they have no other ranks in a trial.
        """
        if self._is_silent or any(map(is_covered, self._model.modules())):
            return
        again = self._reduce(self._outputs[0], self._parts[0])
        if not self._adds_up(self._sums, self._tolerance) and _same(again, self._sums[0]):
            self._not_sum = NotSum(self._sums, self._parts[0].samples)

    @property
    def _tolerance(self) -> float:
        """The error of sums in the precision of the model, relative to the largest loss."""
        half = self._autocast or any(each.dtype.itemsize < 4 for each in self._model.parameters())
        return TOLERANCE if half else EQUAL

    def _reduce_parts(self) -> None:
        """Compute the losses of the outputs for the parts, on all ranks: a loss may be collective."""
        if not self._is_silent and len(self._outputs) == 3:
            try:
                found = [self._reduce(self._outputs[n], self._parts[n]) for n in (*WHOLE, *HALVES)]
                self._sums = found if self._missing else self._sums
            except Exception as error:  # a loss may fail on halves of a batch
                self._obstacle = f"half of a batch raised {type(error).__name__}: {error}"

    def _difference(self, again: Observed | None) -> str:
        """Return the first module with other rows in halves than in the whole, on this rank.

        Not for models that call `shoal.gather`, which has no other ranks in a trial.
        """
        found = [self._observed[n] for n in (*WHOLE, *HALVES) if n in self._observed]
        if not self._can_cut or again is None or len(found) < 3 or self._gathers:
            return ""
        first, *halves = (each.rows for each in found)
        inputs = [each.inputs for each in found] if self._compares_inputs else []
        differs = first_difference(self._model, first, again.rows, halves, inputs)
        alike = is_comparable(first, halves) or (self._missing and add_up(self._sums))
        if differs or alike or not inputs:
            return differs
        return first_difference(self._model, first, again.rows, halves)

    def _repeated_difference(self, *, quiet: bool) -> str:
        """Return the first module that differs and does not draw by rank. Collective."""
        self._compares_inputs = True
        self._run((*WHOLE, *HALVES), quiet=quiet)
        again = self._observed.get(0)
        self._run(WHOLE, quiet=quiet)
        return self._of_any_rank(self._difference(again))

    def _of_any_rank(self, found: str) -> str:
        return next(filter(None, self._world.gather(found)), "")


def _same(one: LossSum, other: LossSum) -> bool:
    """Return whether losses of two runs may be the same."""
    return math.isclose(one[0], other[0], rel_tol=ROUNDED)


def _in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
