"""The search for modules that couple samples: the outputs of all modules, compared between runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal._torch.dispatch import tree_flatten
from shoal.strategies.coupling.batch_norm import is_covered
from shoal.strategies.dtensor import is_divided

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


@dataclass
class Observed:
    """The record of a forward pass: the digests of its modules, and the buffers before and after it.

    `draws_elsewhere` is true if it draws from generators that are not torch's.
    """

    rows: Digests = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    draws_elsewhere: bool = False

    @contextmanager
    def running(self, model: nn.Module, samples: int, start: dict[str, Tensor]) -> Iterator[None]:
        """Observe a forward pass of `samples` inside, and restore the buffers.

        It begins with the buffers in `start`, and otherwise with those that the model has.
        """
        calls: dict[str, int] = {}

        def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            number = calls[name] = calls.get(name, -1) + 1
            leaves = tree_flatten(output)[0]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_divided(leaf)]
            rows = [leaf for leaf in tensors if leaf.dim() and len(leaf) == samples]
            rows = [leaf.reshape(len(leaf), -1) for leaf in rows if leaf.is_floating_point()]
            if rows:
                self.rows[name, number, sum(leaf.shape[1] for leaf in rows)] = digest(rows)

        self.before = _copied_buffers(model)
        _load_buffers(model, start)
        states = _other_random_states()
        with ExitStack() as stack:
            stack.callback(_load_buffers, model, self.before)
            for name, module in model.named_modules():
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
            yield
            self.draws_elsewhere = states != _other_random_states()
            self.after = _copied_buffers(model)


def first_difference(model: nn.Module, first: Digests, again: Digests, halves: list[Digests]) -> str:
    """Return the module that finishes first with other rows in halves than in the whole.

    Modules whose rows differ `again` draw by rank, and are not compared.
    """
    for key, rows in first.items():
        if not (key in again and all(key in half for half in halves)):
            continue
        joined = torch.cat([half[key] for half in halves])
        largest = rows[:, 1].max()
        if joined.shape != rows.shape or bool(((again[key] - rows).abs() > REPEATED * largest).any()):
            continue
        if bool(((joined - rows).abs() > TOLERANCE * largest).any()):
            # BatchNorm without running statistics couples samples in eval mode too.
            return "" if is_covered(model.get_submodule(key[0])) else described(model, key[0])
    return ""


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that differ."""
    return {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])}


def described(model: nn.Module, name: str) -> str:
    """Return the name and the class of a module."""
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def _copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers of floating-point numbers; others are counters."""
    return {name: each.clone() for name, each in model.named_buffers() if each.is_floating_point()}


def _load_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        value = values.get(name, buffer)
        # A copy of equal values would count as a change of the buffer.
        if value.shape == buffer.shape and not torch.equal(value, buffer):
            buffer.copy_(value)


def _other_random_states() -> object:
    """Return the states of the random generators of Python and NumPy, to compare them."""
    numpy: Any = np.random.get_state(legacy=False)
    return random.getstate(), numpy["state"]["pos"], numpy["state"]["key"].tobytes()


@torch.no_grad()
def digest(rows: list[Tensor]) -> Tensor:
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
        sums[1] += values.square().sum(1)
        first = last
    return torch.stack((sums[0], sums[1].sqrt()), dim=1)
