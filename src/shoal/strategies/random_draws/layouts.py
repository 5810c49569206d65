"""The dimension of a tensor that counts samples, by its size in micro-batches of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
        return found[0][0] if found else None

    def merge(self, others: Iterable[Mapping[str, list[Fit]]]) -> None:
        """Keep at each site the fits of all ranks that have seen it."""
        for other in others:
            for site, fits in other.items():
                known = self.possible.setdefault(site, fits)
                self.possible[site] = fits and ([each for each in known if each in fits] or known)
