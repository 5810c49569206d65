"""The search for modules that couple samples: inputs and outputs of all modules, compared between runs.

A module couples samples if its outputs differ between runs in which it had the same inputs. Rows count
as the same in any order: those of experts, graphs or packed sequences are not in the order of samples.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal._torch.autograd import version
from shoal._torch.dispatch import tree_flatten
from shoal._torch.graphs import has_no_values
from shoal.strategies.coupling.batch_norm import is_covered
from shoal.strategies.dtensor import is_divided

TOLERANCE = 0.02
"""Relative to the largest row: the error of sums in half precision."""
REPEATED = 1e-3
"""Relative to the largest row: the error of a run that is repeated. Above it, a module draws."""
_CONVERTED, _WEIGHTS = 1 << 18, 1 << 14
"""The number of elements of an output that are converted at a time, and of different weights."""

Digests: TypeAlias = dict[tuple[str, int, int], Tensor]
"""A weighted sum and the norm of each row of a module's inputs or outputs, by the module's name, the
number of its call, and the number of columns: outputs of other widths, such as the states of an LSTM
whose layers are as many as the samples, can't be compared."""


@dataclass
class Observed:
    """The record of a forward pass: the digests of its modules, and the buffers before and after it.

    `changed` has the names of the buffers that it has written. `draws_elsewhere` is true if it draws
    from generators that are not torch's.
    """

    inputs: Digests = field(default_factory=dict)
    rows: Digests = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    draws_elsewhere: bool = False

    @contextmanager
    def running(
        self,
        model: nn.Module,
        samples: int,
        start: dict[str, Tensor],
        *,
        modules: bool,
        inputs: bool = False,
        names: Collection[str] | None = None,
    ) -> Iterator[None]:
        """Observe a forward pass of `samples` inside, with its `modules`, and restore the buffers.

        Outputs of modules are digested, and with `inputs` their inputs too.

        It begins with the buffers in `start`, and otherwise with those that the model has. Only those
        in `names` are copied and restored; None means all.
        """

        def note(found: Digests, calls: Counter[str], name: str, value: Any) -> None:
            calls[name] += 1
            if rows := _rows(value, samples):
                found[name, calls[name], sum(each.shape[1] for each in rows)] = digest(rows)

        def note_inputs(name: str, module: nn.Module, arguments: Any, named: Any) -> None:
            note(self.inputs, begun, name, (arguments, named))

        def note_outputs(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            found = tree_flatten(output)[0]
            if not is_covered(module):  # whose integers differ too, such as choices of experts
                found = [leaf for leaf in found if _is_floating(leaf)]
            note(self.rows, ended, name, found)

        begun: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        self.before = _copied_buffers(model, names)
        _load_buffers(model, start)
        versions = {name: buffer_version(each) for name, each in model.named_buffers()}
        states = _other_random_states()
        with ExitStack() as stack:
            stack.callback(_load_buffers, model, self.before)
            for name, module in model.named_modules() if modules else ():
                if inputs:  # before the call, which may change them in place
                    before = partial(note_inputs, name)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(note_outputs, name)).remove)
            yield
            self.draws_elsewhere = states != _other_random_states()
            self.changed = {
                name
                for name, each in model.named_buffers()
                if versions.get(name) != buffer_version(each)
            }
            self.after = _copied_buffers(model, names)


def first_difference(
    model: nn.Module,
    first: Digests,
    again: Digests,
    halves: Sequence[Digests],
    inputs: Sequence[Digests] = (),
) -> str:
    """Return the module that finishes first with other rows in halves than in the whole.

    Modules whose rows differ `again` draw by rank, and are not compared. With `inputs`, those of the
    whole and the halves, other rows must come from the same inputs; the model's are always the same.
    """
    given = _same_rows(inputs[0], inputs[1:]) if inputs else {}
    for key, same in _same_rows(first, halves).items():
        name, rows = key[0], first[key]
        if same or key not in again or not _close(again[key], rows, REPEATED):
            continue
        if is_covered(model.get_submodule(name)):
            return ""  # BatchNorm without running statistics couples samples in eval mode too
        if not (inputs and name) or any(alike for call, alike in given.items() if call[:2] == key[:2]):
            return described(model, name)
    return ""


def is_comparable(first: Digests, halves: Sequence[Digests]) -> bool:
    """Return whether the rows of the model's own output in halves can be compared with the whole."""
    return any(not name for name, _, _ in _same_rows(first, halves))


def _same_rows(first: Digests, halves: Sequence[Digests]) -> dict[tuple[str, int, int], bool]:
    """Return for each tensor that is as long as its halves whether they have the same rows."""
    found = {}
    for key, rows in first.items():
        if all(key in half for half in halves):
            joined = torch.cat([half[key] for half in halves])
            if joined.shape == rows.shape:
                found[key] = _close(joined, rows, TOLERANCE) or _close(
                    joined.sort(0)[0], rows.sort(0)[0], TOLERANCE
                )
    return found


def _close(found: Tensor, rows: Tensor, tolerance: float) -> bool:
    """Return whether digests have the same shape and differ by less than the error of rounding."""
    if found.shape != rows.shape or not len(rows):
        return found.shape == rows.shape
    return not bool(((found - rows).abs() > tolerance * rows[:, 1].max()).any())


def _rows(value: Any, samples: int) -> list[Tensor]:
    """Return tensors in `value` as matrices of one length: `samples`, or else that of the first."""
    leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    plain = [leaf for leaf in leaves if not (is_divided(leaf) or leaf.is_nested or leaf.is_complex())]
    tensors = [leaf for leaf in plain if leaf.layout is torch.strided]
    lengths = [len(leaf) for leaf in tensors]
    length = samples if samples in lengths else next(iter(lengths), 0)
    return [leaf.unsqueeze(1).flatten(1) for leaf in tensors if len(leaf) == length]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def described(model: nn.Module, name: str) -> str:
    """Return the name and the class of a module."""
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def buffer_version(buffer: Tensor) -> tuple[int, int]:
    """Return a value that changes if a buffer is written or replaced."""
    return id(buffer), 0 if buffer.is_inference() else version(buffer)


def _copied_buffers(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    return {
        name: each.clone() for name, each in model.named_buffers() if names is None or name in names
    }


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
def digest(rows: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weighted sum and the norm of each row of some tensors, in float64.

    They are computed in `dtype`, or in float64 if that overflows, as with the mask of an attention.
    Only some columns are converted at a time: a copy of an activation could exceed the memory that a
    step needs. In a trace, nothing is computed.
    """
    samples = len(rows[0])
    if has_no_values(rows[0]):
        return rows[0].new_zeros(samples, 2, dtype=torch.float64)
    columns = _WEIGHTS
    while columns > 1 and columns * samples > _CONVERTED:
        columns //= 2
    sums = torch.zeros(2, samples, dtype=torch.float64, device=rows[0].device)
    for each in rows:
        kept = each.dtype if each.dtype == torch.float64 else dtype
        length = min(_WEIGHTS, each.shape[1])  # weights are repeated in wider rows
        weights = torch.arange(length, dtype=kept, device=each.device).cos_()
        for first, part in enumerate(each.split(columns, 1)):
            values, place = part.to(kept), first * columns % _WEIGHTS
            sums[0] += values @ weights[place : place + part.shape[1]]
            sums[1] += torch.linalg.vector_norm(values, dim=1).double().square_()
    if dtype != torch.float64 and not math.isfinite(sums.sum()):
        return digest(rows, torch.float64)
    return torch.stack((sums[0], sums[1].sqrt()), dim=1)
