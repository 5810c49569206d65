"""The dimension of a tensor that counts samples, by its size in micro-batches of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from shoal.util.errors import StepError

_CHOSEN: ContextVar[tuple[int | None] | None] = ContextVar("chosen sample dimension", default=None)

Fit = tuple[int, int]
"""A dimension, and the number of its elements per sample."""


class Layouts:
    """The possible sample dimensions of the draws at each site.

    A dimension counts samples if its size is a fixed multiple of their number: `(samples, …)`,
    `(samples * length, …)` with the elements of a sample next to each other, as attention over
    `samples * heads` has, or `(length, samples, …)`. One size may fit several dimensions by chance, so
    each site keeps those that have fitted at all numbers of samples so far, and none once the shape was
    the same at a different number. Before the first step, the check of the loss function runs the model
    on halves of a micro-batch.
    """

    def __init__(self) -> None:
        self.possible: dict[str, list[Fit]] = {}
        """By site, the most likely fit first. Empty if no dimension counts samples."""
        self.declared: set[str] = set()
        """Sites whose fit `shoal.samples` declares."""
        self.resized: set[str] = set()
        """Modules that have drawn for samples of several sizes, not only in their first dimension."""
        self._seen: dict[str, tuple[tuple[int, ...], int]] = {}

    def dimension(self, site: str, shape: Sequence[int], samples: int) -> int | None:
        """Return the sample dimension of a draw of this shape, or None if it has none."""
        found = [(1, 1)] if len(shape) > 1 and shape[1] == samples else []
        if shape and shape[0] % samples == 0 and (len(shape) > 1 or shape[0] == samples):
            found.insert(0 if shape[0] == samples else len(found), (0, shape[0] // samples))
        before, number = self._seen.setdefault(site, (tuple(shape), samples))
        known = self.possible.get(site, found)
        if not known or (before == tuple(shape) and number != samples):
            found = []
        else:
            found = [each for each in found if each in known] or found
        self.possible[site] = found
        if not found:
            return None
        dim, each = found[0]
        later = 1 if each > 1 else 2  # dimensions on whose sizes the number of an element depends
        if before[later:] != tuple(shape[later:]):
            self.resized.add(_module_of(site))
        return dim

    def modules(self) -> list[str]:
        """Return the names of the modules that have drawn, each once."""
        return list(dict.fromkeys(map(_module_of, self.possible)))

    def merge(self, others: Iterable[Mapping[str, list[Fit]]]) -> None:
        """Keep at each site the fits of all ranks that have seen it."""
        for other in others:
            for site, fits in other.items():
                known = self.possible.setdefault(site, fits)
                self.possible[site] = fits and ([each for each in known if each in fits] or known)


def _module_of(site: str) -> str:
    """Return the name of the module of a site, whose draws in a loss function count separately."""
    return site.partition("#")[0].rpartition(" ")[2]


@contextmanager
def samples(*, dim: int | None) -> Iterator[None]:
    """Declare which dimension counts samples in random operations such as dropout.

    Shoal recognizes the layouts `(samples, …)`, `(samples * length, …)` and `(length, samples, …)` by
    the sizes of a tensor. Use `samples` for tensors of other layouts in a model or a loss function.
    Outside a training step it has no effect. Before the first step, Shoal runs a model
    without compilation to find its layouts; compiled code uses them.

    Args:
        dim: The dimension of the tensors that are drawn. Its size is the number of samples of the
            micro-batch, or a multiple of it if the elements of a sample are next to each other. None
            means that no dimension counts samples: all ranks and micro-batches of a step draw the same
            numbers.

    Returns:
        A context manager, which is also a decorator of functions.

    Raises:
        StepError: If `dim` is neither an integer nor None, or if a tensor that is drawn has no such
            dimension.

    Examples:
        >>> from torch.nn.functional import dropout
        >>> def forward(x):  # of shape (frames, joints, samples)
        ...     with shoal.samples(dim=2):
        ...         return dropout(x, 0.1)
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
    token = _CHOSEN.set((dim,))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def sample_dimension(layouts: Layouts, site: str, shape: Sequence[int], number: int) -> int | None:
    """Return the dimension that counts `number` samples: the declared one, or the one found by size."""
    chosen = _CHOSEN.get()
    if chosen is None:
        return layouts.dimension(site, shape, number)
    (dim,) = chosen
    layouts.declared.add(site)
    if dim is None:
        layouts.possible[site] = []
        return None
    if not -len(shape) <= dim < len(shape) or shape[dim] % number:
        raise StepError(
            given=f"shoal.samples(dim={dim}), and a draw for a tensor of shape {tuple(shape)}",
            found=f"the micro-batch has {number} samples, and this dimension does not count them",
            fix="pass the dimension whose size is a multiple of the number of samples, or dim=None if "
            "there is none",
        )
    layouts.possible[site] = [(dim % len(shape), shape[dim] // number)]
    return dim % len(shape)
