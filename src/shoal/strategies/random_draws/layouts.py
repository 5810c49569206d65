"""The dimension of a tensor that counts samples, by its size in micro-batches of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from shoal.strategies.random_draws.philox import RowIndex
from shoal.strategies.random_draws.row_index import BatchRows, has_integers, row_index
from shoal.util.errors import StepError

Fit: TypeAlias = tuple[int, int]
"""A dimension, and the number of its elements per sample: 0 if an index tells the sample of each."""

_SEARCHES = 16
"""Micro-batches that are searched for left padding: on a GPU, the host waits for it."""


class _Chosen(NamedTuple):
    """The dimension and the rows that `shoal.samples` declares."""

    dim: int | None
    rows: RowIndex | None

    def fit(self, shape: tuple[int, ...], samples: int) -> Fit | None:
        """Return the sample dimension of a draw of this shape; raise StepError if it is none."""
        if self.dim is None:
            return None
        given = f"shoal.samples(dim={self.dim}), and a draw for a tensor of shape {shape}"
        exists = -len(shape) <= self.dim < len(shape)
        if self.rows is None:
            if exists and shape[self.dim] % samples == 0:
                return self.dim % len(shape), shape[self.dim] // samples
            raise StepError(
                given=given,
                found=f"the micro-batch has {samples} samples, and this dimension does not count them",
                fix="pass the dimension whose size is a multiple of the number of samples, or dim=None "
                "if there is none",
            )
        rows, last = len(self.rows.samples), max(self.rows.samples.tolist(), default=0)
        if exists and shape[self.dim] == rows and last < samples:
            return self.dim % len(shape), 0
        raise StepError(
            given=given,
            found=f"the index has {rows} rows of samples up to number {last}, and the micro-batch has "
            f"{samples} samples",
            fix="shoal.samples(index=…) with the sample, in its micro-batch, of each row of the tensor",
        )


_CHOSEN: ContextVar[_Chosen | None] = ContextVar("chosen sample dimension", default=None)


_ROWS, _MERGED, _LEFT, _PERMUTED = _REASONS = (
    "random numbers were drawn for rows that are not samples, in {}; shoal.samples(index=…) tells the "
    "sample of each row",
    "random numbers were drawn for a dimension that is a multiple of the length of padded sequences, "
    "in {}; keep the length in a dimension of its own",
    "random numbers were drawn for sequences that are padded on the left to different lengths, in {}; "
    "pad them on the right, or all to one length",
    "torch.randperm has permuted the samples of a micro-batch, in {}; Loader(…, partners=1) pairs "
    "samples of the global batch",
)


class Unknown:
    """Modules whose draws do not belong to samples, with the reasons."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        """Reasons and names of modules."""
        self._taken: set[tuple[str, str]] = set()

    def add(self, reason: str, module: str) -> None:
        """Note a module for a reason."""
        self.found.add((reason, module))

    def add_rows(self, module: str) -> None:
        """Note a module that draws for rows of which the sample is not known."""
        self.add(_ROWS, module)

    def take_lines(self, nameless: str) -> Iterator[str]:
        """Yield each reason with the modules that were not yielded before."""
        new, self._taken = self.found - self._taken, self.found.copy()
        for reason in _REASONS:
            modules = sorted(module or nameless for why, module in new if why == reason)
            if modules:
                yield reason.format(", ".join(modules))


class _First(NamedTuple):
    """The first draw of a site."""

    shape: tuple[int, ...]
    samples: int
    lengths: tuple[int, ...]

    def sizes(self, fit: Fit | None) -> list[int]:
        """Return the sizes of a row."""
        return _row_sizes(self.shape, fit, self.samples)

    def has_grown(self, fit: Fit, batch: BatchRows) -> bool:
        """Return whether samples that are as many times longer explain a shape that has not changed."""
        dim, each = fit
        if each == 0:
            return True
        before = self.shape[dim] // self.samples
        return _explained(before, each, self.lengths, batch.lengths) is not None


class Layouts:
    """The possible sample dimensions of the draws at each site.

    A dimension counts samples if its size is a fixed multiple of their number: `(samples, …)`,
    `(samples * length, …)` with the elements of a sample next to each other, as attention over
    `samples * heads` has, or `(length, samples, …)`. The first dimension may also have rows of which
    the batch tells the samples. One size may fit several dimensions by chance, so each site keeps those
    that have fitted at all numbers of samples so far, and none once the shape was the same at a
    different number. Before the first step, the check of the loss function runs the model on halves of
    a micro-batch.
    """

    def __init__(self) -> None:
        self.possible: dict[str, list[Fit]] = {}
        """By site, the most likely fit first. Empty if no dimension counts samples."""
        self.declared: set[str] = set()
        """Sites whose fit `shoal.samples` declares."""
        self.unknown = Unknown()
        self._first: dict[str, _First] = {}
        self._not_samples: set[str] = set()
        """Sites of permutations that were not as long as a micro-batch."""
        self._searches = _SEARCHES
        self._searched: WeakSet[BatchRows] = WeakSet()
        """The micro-batches that were searched for left padding, while they exist."""
        self._padded_left = False

    def fit(self, site: str, shape: Sequence[int], batch: BatchRows) -> Fit | None:
        """Return the sample dimension of a draw of this shape, or None if it has none."""
        shape = tuple(shape)
        before = self._first.setdefault(site, _First(shape, batch.samples, batch.lengths))
        known = self.possible.get(site)
        found = _by_size(shape, batch.samples)
        for dim in (0, 1) if shape[:1] == (1,) else (0,):
            listed = known is None or (dim, 0) in known
            if listed and dim < len(shape) and batch.index(shape[dim]) is not None:
                found.insert(1 if shape[dim] == batch.samples else 0, (dim, 0))
        if known is not None:
            dims = {dim for dim, _ in known}
            kept = [each for each in found if each in known]
            found = kept or [each for each in found if each[0] in dims]
            if before.shape == shape and before.samples != batch.samples:
                found = [each for each in found if before.has_grown(each, batch)]
        self.possible[site] = found
        fit = found[0] if found else None
        if len(found) < 2:  # several may fit by chance, and the sizes of a row be others
            self._find_unknown(module_of(site), shape, fit, before, batch)
        return fit

    def add_of_step(self, site: str, count: int, samples: int) -> None:
        """Note a permutation, whose numbers belong to the step; it may be one of the samples."""
        reason, module = _PERMUTED, module_of(site)
        if count != samples:
            self._not_samples.add(site)
            self.unknown.found.discard((reason, module))
        elif samples > 1 and site not in self._not_samples:
            self.unknown.add(reason, module)
        self.possible[site] = []

    def _find_unknown(
        self, module: str, shape: tuple[int, ...], fit: Fit | None, before: _First, batch: BatchRows
    ) -> None:
        """Find out whether the numbers of a draw depend on the sizes of the micro-batch."""
        sizes, sizes_before = _row_sizes(shape, fit, batch.samples), before.sizes(fit)
        if fit is None and shape == before.shape:
            if batch.samples == before.samples and batch.numbers_of_rows.intersection(shape):
                self.unknown.add_rows(module)
            return
        if len(sizes) != len(sizes_before):
            self.unknown.add_rows(module)
            return
        ragged = fit is None or fit[1] == 0
        for dim, (one, other) in enumerate(zip(sizes_before, sizes, strict=True)):
            if one == other:
                continue
            kind = _explained(one, other, before.lengths, batch.lengths)
            if ragged and other in batch.numbers_of_rows:  # as in attention between packed tokens
                self.unknown.add_rows(module)
            elif kind == "multiple":
                self.unknown.add(_MERGED, module)
            elif kind is None and (fit is None or (dim == 0 and fit[1] > 0)):
                self.unknown.add_rows(module)
            elif self._is_padded_left(before, batch):
                self.unknown.add(_LEFT, module)

    def _is_padded_left(self, before: _First, batch: BatchRows) -> bool:
        if self._searches and batch not in self._searched:
            self._searches -= 1
            self._searched.add(batch)
            lengths = {other for _, other in _changed(before.lengths, batch.lengths)}
            self._padded_left |= batch.is_padded_left(lengths)
        return self._padded_left

    def modules(self) -> list[str]:
        """Return the names of the modules that have drawn, each once."""
        return list(dict.fromkeys(map(module_of, self.possible)))

    def merge(self, others: Iterable[Mapping[str, list[Fit]]]) -> None:
        """Keep at each site the fits of all ranks that have seen it."""
        for other in others:
            for site, fits in other.items():
                known = self.possible.setdefault(site, fits)
                self.possible[site] = fits and ([each for each in known if each in fits] or known)


def _by_size(shape: tuple[int, ...], samples: int) -> list[Fit]:
    found = [(1, 1)] if len(shape) > 1 and shape[1] == samples else []
    if shape and shape[0] % samples == 0 and (len(shape) > 1 or shape[0] == samples):
        found.insert(0 if shape[0] == samples else len(found), (0, shape[0] // samples))
    return found


def _row_sizes(shape: tuple[int, ...], fit: Fit | None, samples: int) -> list[int]:
    """Return the sizes of the dimensions of a row; the first is the number of elements per sample."""
    sizes = list(shape)
    if fit is None:
        return sizes
    size = sizes.pop(fit[0])
    return [size // samples if fit[1] else 0, *sizes]


def _explained(
    before: int, now: int, lengths_before: Sequence[int], lengths: Sequence[int]
) -> Literal["length", "multiple"] | None:
    """Return whether a size changed as the length of sequences, or as a multiple of it."""
    for one, other in _changed(lengths_before, lengths):
        if now - before == other - one:  # the same length, or with a first or last element
            return "length"
    for one, other in _changed(lengths_before, lengths):
        if not before % one and not now % other and before > one and now > other:
            return "multiple"
        if before <= one and now <= other and round(one / before) == round(other / now):
            return "length"  # every second or fourth element, as after convolutions with a stride
    return None


def _changed(before: Sequence[int], now: Sequence[int]) -> set[tuple[int, int]]:
    """Return the lengths that differ between two micro-batches."""
    if len(before) != len(now):
        return set()
    return {(one, other) for one, other in zip(before, now, strict=True) if one != other}


def module_of(site: str) -> str:
    """Return the name of the module of a site, whose draws in a loss function count separately."""
    return site.partition("#")[0].rpartition(" ")[2]


@contextmanager
def samples(*, dim: int | None = 0, index: Tensor | None = None) -> Iterator[None]:
    """Declare which dimension counts samples in random operations such as dropout.

    Shoal recognizes the layouts `(samples, …)`, `(samples * length, …)` and `(length, samples, …)` by
    the sizes of a tensor. It also recognizes `(rows, …)` if the batch tells the sample of each row, in
    one of these integer tensors:

    - the first row of each sample and the end of the last one, such as `ptr` or `cu_seqlens`;
    - the number of rows of each sample;
    - the sample of each row, such as `batch` of PyTorch Geometric.

    Use `samples` for tensors of other layouts in a model or a loss function. Outside a training step it
    has no effect. Before the first step, Shoal runs a model without compilation to find its layouts;
    compiled code uses them, and draws by rank for rows of an index.

    Args:
        dim: The dimension of the tensors that are drawn. Its size is the number of samples of the
            micro-batch, or a multiple of it if the elements of a sample are next to each other; with
            `index`, the length of the index. None means that no dimension counts samples: all ranks and
            micro-batches of a step draw the same numbers.
        index: The sample of each row, an integer tensor of shape (rows,), with values from 0 to the
            number of samples of the micro-batch - 1. The numbers of a row depend on its sample and on
            its place among the rows of this sample. None means that samples are consecutive.

    Returns:
        A context manager, which is also a decorator of functions.

    Raises:
        StepError: If `dim` is neither an integer nor None, if `index` is not a tensor of integers, or
            if a tensor that is drawn has no such dimension.

    Examples:
        >>> from torch.nn.functional import dropout
        >>> def forward(x):  # of shape (frames, joints, samples)
        ...     with shoal.samples(dim=2):
        ...         return dropout(x, 0.1)
        >>> def forward(nodes, graph):  # of shape (nodes, features), and the graph of each node
        ...     with shoal.samples(index=graph):
        ...         return dropout(nodes, 0.1)
    """
    if isinstance(dim, bool) or not isinstance(dim, int | None):
        raise StepError(
            given=f"shoal.samples(dim={dim!r})",
            found="a dimension is an integer, or None for tensors without samples",
            fix="shoal.samples(dim=1)",
        )
    if torch.compiler.is_compiling():
        yield
        return
    token = _CHOSEN.set(_Chosen(dim, None if index is None else _checked_index(index, dim)))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def declared_samples(rows: int) -> Tensor | None:
    """Return the sample of each of these rows, as `samples` declares it now; None if it does not."""
    chosen = _CHOSEN.get()
    told = None if chosen is None or chosen.rows is None else chosen.rows.samples
    return told if told is not None and len(told) == rows else None


def _checked_index(index: Tensor, dim: int | None) -> RowIndex:
    given = f"shoal.samples(index={type(index).__name__})"
    fix = "shoal.samples(index=…) with the sample of each row, an integer tensor of shape (rows,)"
    if not isinstance(index, Tensor):
        raise StepError(given=given, found="an index is a tensor", fix=fix)
    if index.ndim != 1 or not has_integers(index):
        found = f"its dtype is {index.dtype}, and its shape {tuple(index.shape)}"
        raise StepError(given=given, found=found, fix=fix)
    if dim is None:
        found = "dim=None, which means that there are no samples"
        raise StepError(given=given, found=found, fix="shoal.samples(dim=0, index=…)")
    values = index.detach().long().cpu()
    if len(values) and int(values.min()) < 0:
        raise StepError(given=given, found=f"the index holds {int(values.min())}", fix=fix)
    return row_index(values)


def find_rows(
    layouts: Layouts, site: str, shape: Sequence[int], batch: BatchRows
) -> tuple[Fit | None, RowIndex | None]:
    """Return the dimension that counts samples, the declared one or the one found, and its index."""
    chosen = _CHOSEN.get()
    if chosen is None:
        fit = layouts.fit(site, shape, batch)
        return fit, batch.index(shape[fit[0]]) if fit and not fit[1] else None
    layouts.declared.add(site)
    fit = chosen.fit(tuple(shape), batch.samples)
    layouts.possible[site] = [fit] if fit else []
    return fit, chosen.rows
