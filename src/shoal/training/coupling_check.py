"""The check before the first step for modules that couple samples in a way that Shoal does not know."""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal._torch.dispatch import tree_flatten
from shoal._torch.modules import has_compiled_call
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.strategies.batch_norm import coupled_layers, is_covered
from shoal.strategies.contracts import Engine
from shoal.strategies.coupled_layers import drops
from shoal.strategies.dtensor import is_divided
from shoal.strategies.eval_mode import each_in_eval_mode, untouched
from shoal.strategies.random_draws.draws import constant_draws, is_registered, layouts_of
from shoal.strategies.task import Task
from shoal.training.loss_check import part_of

TOLERANCE = 0.02
"""Relative to the largest row: the error of sums in half precision."""
REPEATED = 1e-3
"""Relative to the largest row: the error of a run that is repeated. Above it, a module draws."""
_CONVERTED = 1 << 18
"""The number of elements of an output that are converted to float64 at a time."""

Digests: TypeAlias = dict[tuple[str, int, int], Tensor]
"""A weighted sum and the norm of each row of a module's output, by the module's name, the number of
its call, and the number of columns: outputs of other widths, such as the states of an LSTM whose layers
are as many as the samples, can't be compared."""


def say_coupled(engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None) -> None:
    """Print once what makes the results depend on how the batch is split, as far as runs show it.

    These are modules whose output for a sample depends on other samples, random numbers that do not
    belong to samples, and modules that change their own state. A rank's first micro-batch runs twice as
    a whole and once in halves, in training mode and without gradients. Known layers, BatchNorm,
    `shoal.Coupled` and dropout, are in eval mode, and all draws are constants. If nothing is found and
    modules draw, it runs again with their random numbers. Modules whose output differs in the two whole
    runs draw by rank, and are not compared. Buffers and random states are restored. Models that are
    compiled or split into stages are not tried. Collective.
    """
    world, model = engine.world, engine.module
    if engine.loop is None or (world.data_size == 1 and len(batch) == 1):
        return
    if any(map(has_compiled_call, model.modules())):
        return
    trial = _SplitTrial(engine, task, batch, autocast)
    known = coupled_layers(model)
    with torch.no_grad(), untouched(model, trial.micro.value), each_in_eval_mode(known):
        with each_in_eval_mode(filter(drops, model.modules())), constant_draws():
            name = trial.difference()
        if name:
            world.print(
                f"shoal: results depend on how the batch is split, because the output of {name} for a "
                "sample depends on other samples of its micro-batch; shoal.Coupled makes such a layer "
                "exact"
            )
        elif is_registered(model) and any(world.gather(trial.draws_elsewhere)):
            world.print(
                "shoal: results depend on how the batch is split, because the model draws from the "
                "random generators of Python or NumPy, which are those of the rank; torch's belong to "
                "samples"
            )
        elif is_registered(model) and any(world.gather(bool(layouts_of(model).possible))):
            name = trial.difference()
            if name:
                world.print(
                    "shoal: results depend on how the batch is split, because random numbers of "
                    f"{name}, or of a module before it, do not belong to samples; "
                    "shoal.samples(dim=…) declares the dimension that counts samples"
                )
        name = trial.changing()
    if name:
        world.print(
            f"shoal: results depend on how the batch is split, because {name} changes its buffers in "
            "each forward pass; shoal.Coupled makes such a layer exact"
        )


class _SplitTrial:
    """A rank's first micro-batch, complete and in halves."""

    def __init__(self, engine: Engine, task: Task, batch: Batch, autocast: torch.dtype | None) -> None:
        self._engine = engine
        self._run = partial(_digests, engine, task, seed=batch.seed, autocast=autocast)
        self._micro_batches = len(batch)
        self.micro = micro = batch.micros[0]._replace(world=None, place=None)
        # A rank that cannot cut takes part in the collectives of the forward.
        self._parts = [micro, micro]
        middle = micro.samples // 2
        with suppress(ValueError):
            if micro.weight and middle:
                cuts = (slice(0, middle), slice(middle, micro.samples))
                self._parts = [part_of(micro, rows) for rows in cuts]
        self._changed: set[str] = set()
        """Buffers that a forward pass changes."""
        self.draws_elsewhere = False
        """Whether the model draws from generators that are not torch's."""

    def difference(self) -> str:
        """Return the first module with other rows in halves than in the whole. Collective."""
        found = ""
        with suppress(Exception):  # a real error occurs again in the step
            before, states = self._copied_buffers(), _other_random_states()
            first = self._run(self.micro)
            self.draws_elsewhere |= states != _other_random_states()
            self._changed |= _unequal(before, self._copied_buffers())
            again, *halves = map(self._run, (self.micro, *self._parts))
            if self._parts[0] is not self.micro:
                found = _first_difference(self._engine.module, first, again, halves)
        return self._of_any_rank(found)

    def changing(self) -> str:
        """Return a module whose buffers after the forward passes depend on the split. Collective."""
        if not any(self._engine.world.gather(bool(self._changed))):
            return ""
        found: set[str] = set()
        with suppress(Exception), constant_draws():
            before = self._copied_buffers()
            self._run(self.micro)
            once = self._copied_buffers()
            self._run(self.micro)
            if self._micro_batches > 1:
                found |= _unequal(once, self._copied_buffers())
            for name, buffer in self._engine.module.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
            self._run(self._parts[0])
            found |= _unequal(once, self._copied_buffers())
        names = sorted(name.rpartition(".")[0] for name in found & self._changed)
        modules = dict(self._engine.module.named_modules())
        return self._of_any_rank(_named(names[0], modules[names[0]]) if names else "")

    def _copied_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers of floating-point numbers; others are counters."""
        named = self._engine.module.named_buffers()
        return {name: each.clone() for name, each in named if each.is_floating_point()}

    def _of_any_rank(self, found: str) -> str:
        return next(filter(None, self._engine.world.gather(found)), "")


def _unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])}


def _other_random_states() -> object:
    """Return the states of the random generators of Python and NumPy, to compare them."""
    numpy: Any = np.random.get_state(legacy=False)
    return random.getstate(), numpy["state"]["pos"], numpy["state"]["key"].tobytes()


def _named(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _first_difference(model: nn.Module, first: Digests, again: Digests, halves: list[Digests]) -> str:
    """Return the module that finishes first with other rows in halves than in the whole."""
    modules = dict(model.named_modules())
    for key, rows in first.items():
        if not (key in again and all(key in half for half in halves)):
            continue
        joined = torch.cat([half[key] for half in halves])
        largest = rows[:, 1].max()
        if joined.shape != rows.shape or bool(((again[key] - rows).abs() > REPEATED * largest).any()):
            continue
        if bool(((joined - rows).abs() > TOLERANCE * largest).any()):
            module = modules[key[0]]  # BatchNorm without running statistics, in eval mode too
            return "" if is_covered(module) else _named(key[0], module)
    return ""


def _digest(rows: list[Tensor]) -> Tensor:
    """Return a weighted sum and the norm of each row of some tensors.

    In float64, but only some columns at a time: a copy of an activation could exceed the memory that a
    step needs.
    """
    samples = len(rows[0])
    columns = max(1, _CONVERTED // max(1, samples))
    sums = torch.zeros(2, samples, dtype=torch.float64, device=rows[0].device)
    first = 0
    for part in chain.from_iterable(each.split(columns, 1) for each in rows):
        last = first + part.shape[1]
        values = part.double()
        sums[0] += values @ torch.arange(first, last, device=part.device).double().cos_()
        sums[1] += values.square_().sum(1)
        first = last
    return torch.stack((sums[0], sums[1].sqrt()), dim=1)


def _digests(
    engine: Engine, task: Task, micro: MicroBatch, *, seed: int, autocast: torch.dtype | None
) -> Digests:
    """Run the model, and return the digests of the outputs of its modules."""
    found: Digests = {}
    calls: dict[str, int] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        leaves = tree_flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_divided(leaf)]
        rows = [leaf for leaf in tensors if leaf.dim() and len(leaf) == micro.samples]
        rows = [leaf.reshape(len(leaf), -1) for leaf in rows if leaf.is_floating_point()]
        if rows:
            found[name, number, sum(leaf.shape[1] for leaf in rows)] = _digest(rows)

    with ExitStack() as stack:
        for name, module in engine.module.named_modules():
            handle = module.register_forward_hook(partial(note, name))
            stack.callback(handle.remove)
        engine.infer(task, micro, seed, autocast=autocast)
    return found
