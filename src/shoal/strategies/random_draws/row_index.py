"""Rows that are not samples, such as the nodes of graphs: the samples that they belong to.

A batch says to which sample each row belongs with one of its integer tensors: the ends of the samples
(`ptr`, `cu_seqlens`, `offsets`), their numbers of rows, or the sample of each row (`batch`). Its padded
tensors say how long its sequences are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shoal._torch.dispatch import without_modes
from shoal.data.micro import Draws
from shoal.strategies.random_draws.philox import RowIndex

CPU = torch.device("cpu")
"""The device of indices, for any default device."""
_BY_ROW = ("batch", "index", "segment")
"""Words in the names of tensors that hold the sample of each row, in any order."""
_STARTS = ("offset", "ptr")
"""Words in the names of tensors that hold the first row of each sample, and may lack the last end."""


def batch_rows(draws: Draws) -> BatchRows:
    """Return the rows of the current micro-batch, as it tells them."""
    if draws.rows is None:
        draws.rows = BatchRows(draws.micro.value, draws.micro.samples)
    found: BatchRows = draws.rows
    return found


class BatchRows:
    """The samples of rows and the lengths of sequences, as a micro-batch tells them."""

    def __init__(self, value: Any, samples: int) -> None:
        self.samples = samples
        leaves = list(_leaves(value))
        self._leaves = [(name, each) for name, each in leaves if isinstance(each, Tensor)]
        self._packed: list[Tensor] = []
        self._indices: dict[int, RowIndex | None] = {}
        for _, each in leaves:
            if isinstance(each, PackedSequence):
                self.add_packed(each.batch_sizes, each.sorted_indices)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The sizes of the dimensions of its tensors, other than the first, in a fixed order."""
        return tuple(size for _, each in self._leaves if not each.is_nested for size in each.shape[1:])

    @cached_property
    def numbers_of_rows(self) -> set[int]:
        """The sizes of first dimensions that do not count samples; the second one after a 1."""
        shapes = [each.shape for _, each in self._leaves if not each.is_nested and each.ndim]
        if self.samples > 1:
            shapes = [shape[1:] if shape[0] == 1 and len(shape) > 1 else shape for shape in shapes]
        return {shape[0] for shape in shapes} - {self.samples, 1}

    def index(self, rows: int) -> RowIndex | None:
        """Return the index of a number of rows; None if the batch does not tell, or tells two."""
        if rows not in self._indices:
            with without_modes():  # the tensors of the batch have values while a compiler traces
                found = list(self._found(rows))
                same = all(torch.equal(found[0], other) for other in found[1:])
                self._indices[rows] = row_index(found[0]) if found and same else None
        return self._indices[rows]

    def add_packed(self, sizes: Tensor, order: Tensor | None) -> None:
        """Add the rows of a packed sequence: its batch sizes, and its samples by their lengths.

        Without an order, the caller may have sorted the samples: they have that of the batch only if
        it tells the same lengths.
        """
        samples = torch.cat([torch.arange(size, device=CPU) for size in sizes.tolist()])
        lengths = samples.bincount()
        if order is not None:
            samples = order.cpu()[samples]
        elif not any(torch.equal(lengths, told.bincount()) for told in self._told(len(samples))):
            samples = torch.full_like(samples, -1)
        self._packed.append(samples)
        self._indices.pop(len(samples), None)

    def _found(self, rows: int) -> Iterator[Tensor]:
        """Yield the sample of each row, for all that tell it: -1 if it is unknown."""
        packed = [each for each in self._packed if len(each) == rows]
        if not packed or rows in self.numbers_of_rows:
            yield from self._told(rows)
        for samples in packed:
            if int(samples.min()) < 0:
                yield from (samples, samples + 1)  # which disagree
            yield samples
        for name, edges in self._leaves:  # of PyTorch Geometric: each edge belongs to its first node
            if name == "edge_index" and edges.ndim == 2 and edges.shape[1] == rows:
                last = int(edges.max())
                for nodes in sorted(each for each in {*self.numbers_of_rows, last + 1} if each > last):
                    for samples in self._told(nodes):
                        yield samples[edges[0].long().cpu()]

    def _told(self, rows: int) -> Iterator[Tensor]:
        """Yield the sample of each row, of each integer tensor that holds it in a known way."""
        each: Any
        for name, each in self._leaves:
            jagged = each.is_nested and each.layout == torch.jagged
            tensor: Tensor = each.offsets() if jagged else each
            if not tensor.is_nested and tensor.ndim == 1 and has_integers(tensor):
                yield from self._samples_of_rows(name, tensor, rows)

    def _samples_of_rows(self, name: str, tensor: Tensor, rows: int) -> Iterator[Tensor]:
        samples = self.samples
        if len(tensor) not in (samples, samples + 1, rows):
            return
        found = tensor.long().cpu()
        steps = found.diff()
        rising = not bool((steps < 0).any()) and int(found[0]) == 0
        if len(found) == samples + 1 and rising and int(found[-1]) == rows:
            yield torch.arange(samples, device=CPU).repeat_interleave(steps)
        counts = len(found) == samples and not bool((found < 0).any()) and int(found.sum()) == rows
        first_rows = len(found) == samples and rising and int(found[-1]) <= rows
        named = first_rows and _has(name, _STARTS)
        if counts and not named:
            yield torch.arange(samples, device=CPU).repeat_interleave(found)
        if named or (first_rows and counts):  # without a name, it may be either
            ends = torch.cat([found, torch.tensor([rows], device=CPU)])
            yield torch.arange(samples, device=CPU).repeat_interleave(ends.diff())
        within = len(found) == rows and int(found.min()) >= 0 and int(found.max()) < samples
        if within and (_has(name, _BY_ROW) or (rising and int(found.max()) == samples - 1)):
            yield found

    def is_padded_left(self, lengths: Collection[int]) -> bool:
        """Return whether sequences of these lengths are padded on the left: by a mask, or by words.

        A mask is 1 where the words are. Otherwise, two or more sequences begin with two or more times a
        value that is nowhere else.
        """
        with without_modes():
            leaves = [
                (name, each)
                for name, each in self._leaves
                if not each.is_nested
                and each.ndim > 1
                and len(each) == self.samples
                and each.shape[1] > 1
                and each.shape[1] in lengths
            ]
            masks = [(name, each) for name, each in leaves if has_integers(each) and _is_mask(each)]
            named = [mask for mask in masks if "mask" in mask[0]]
            if named or masks:
                return any(bool((mask[:, 0] < mask[:, -1]).any()) for _, mask in named or masks)
            return any(_is_padded(each) and not _is_padded(each.flip(1)) for _, each in leaves)


def row_index(samples: Tensor) -> RowIndex:
    """Return the index of rows that belong to these samples, from 0 on."""
    order = samples.argsort(stable=True)
    counts = samples.bincount()
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=CPU) - starts[samples[order]]
    return RowIndex(samples, places, max(counts.tolist(), default=1) - 1)


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is 0 or 1, and each sequence of it is 1 in one part."""
    if tensor.ndim > 2 or not bool(((tensor == 0) | (tensor == 1)).all()):
        return False
    return bool((tensor.diff(dim=1).abs().sum(1) <= 1).all())


def _is_padded(tensor: Tensor) -> bool:
    rows = tensor.flatten(2) if tensor.ndim > 2 else tensor.unsqueeze(-1)
    first = rows[:, 0]
    twice = (first == rows[:, 1]).all(-1)
    for value in first[twice].unique(dim=0):
        padding = (rows == value).all(-1)
        elsewhere = padding[:, -1].any() or (~padding[:, :-1] & padding[:, 1:]).any()
        ignored = bool((value < 0).any())  # targets, not words
        if not (ignored or bool(elsewhere)) and int((padding[:, 0] & padding[:, 1]).sum()) > 1:
            return True
    return False


def has_integers(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are integers."""
    other = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    return not other


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | PackedSequence]]:
    """Yield the tensors and packed sequences of a batch, and their names."""
    if isinstance(value, Tensor | PackedSequence):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), field.name)
    elif callable(getattr(value, "to_dict", None)):  # graphs of PyTorch Geometric
        yield from _leaves(value.to_dict())
