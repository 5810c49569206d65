"""Global batches of as many samples as fit: sizes from the samples, not from a number."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.util.errors import DataError


class BatchSize(Protocol):
    """How many samples a global batch takes, decided from those that come next in the order."""

    @property
    def at_most(self) -> int:
        """Never more than this: so far the Loader looks ahead."""
        ...

    def __call__(self, indices: npt.NDArray[np.int64], /) -> int:
        """The size of the batch that starts with `indices`: the next `at_most` or, at the end of an
        epoch, fewer. It must be a pure function of them."""
        ...


class TokenBudget:
    """Batches whose samples together have at most `budget` tokens: `Loader(batch_size=Budget(…))`.

    `lengths` has the length of each sample of the dataset. With `padded`, samples count as long as
    the longest of their global batch. A sample longer than the budget is a batch of its own. The
    samples of a batch are consecutive in the order, so batches are the same on any number of ranks
    and resume from a position like all others.
    """

    def __init__(
        self, lengths: npt.ArrayLike, budget: int, *, at_most: int = 1024, padded: bool = False
    ) -> None:
        table = np.asarray(lengths)
        whole = table.ndim == 1 and table.dtype.kind in "iu"
        if not whole or (table < 0).any() or budget < 1 or at_most < 1:
            raise DataError(
                given=f"Budget(lengths of shape {table.shape}, dtype {table.dtype}, {budget}, "
                f"at_most={at_most})",
                found="not one whole number >= 0 per sample, or a limit below 1",
                fix="shoal.TokenBudget([len(text) for text in texts], 8192)",
            )
        self._lengths = table.astype(np.int64)
        self.budget = budget
        self.at_most = at_most
        self._padded = padded

    def __call__(self, indices: npt.NDArray[np.int64], /) -> int:
        """As many of `indices` as fit, one at least."""
        if int(indices.max()) >= len(self._lengths):
            raise DataError(
                given=f"Budget of {len(self._lengths):,} lengths",
                found=f"the order has sample {int(indices.max()):,}",
                fix="one length per sample: print(len(lengths), len(dataset))",
            )
        lengths = self._lengths[indices]
        if self._padded:
            tokens = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        else:
            tokens = np.cumsum(lengths)
        return max(1, int(np.searchsorted(tokens, self.budget, side="right")))
