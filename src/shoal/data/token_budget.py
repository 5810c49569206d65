"""Global batches whose sizes depend on their samples: token budgets."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal.util.errors import DataError


class BatchSize(Protocol):
    """A rule that chooses the size of each global batch from the next samples in the order."""

    @property
    def max_samples(self) -> int:
        """The largest size: the number of samples that the Loader looks ahead."""
        ...

    def __call__(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return the size of the batch that starts with `indices`.

        `indices` are the next `max_samples` or, at the end of an epoch, fewer. The size must be a pure
        function of them.
        """
        ...


class TokenBudget:
    """A batch size in tokens: each global batch has as many samples as fit into `max_tokens`.

    Pass one as the batch size of a Loader. A sample longer than `max_tokens` is a batch by itself. The
    samples of a batch are consecutive in the order, so batches are the same on any number of ranks, and
    a run resumes at a position as usual.

    Args:
        lengths: Number of tokens of each sample of the dataset, integers of shape (samples,).
        max_tokens: Largest number of tokens in a global batch, 1 or more.
        max_samples: Largest number of samples in a global batch, 1 or more. Default: 1024.
        padded: Count each sample with the length of the longest one in its global batch. Default:
            False.

    Raises:
        DataError: If `lengths` does not have one integer, 0 or more, per sample, or a limit is below 1.

    Examples:
        >>> budget = shoal.TokenBudget([3, 5, 2, 9, 1], max_tokens=10)
        >>> with shoal.init() as world:
        ...     loader = shoal.Loader(list(range(5)), world, batch_size=budget, shuffle=False)
        ...     [micro.tolist() for batch in loader.epochs(1) for micro in batch]
        [[0, 1, 2], [3, 4]]
    """

    def __init__(
        self, lengths: npt.ArrayLike, max_tokens: int, *, max_samples: int = 1024, padded: bool = False
    ) -> None:
        table = np.asarray(lengths)
        whole = table.ndim == 1 and table.dtype.kind in "iu"
        if not whole or (table < 0).any() or max_tokens < 1 or max_samples < 1:
            raise DataError(
                given=f"TokenBudget(lengths of shape {table.shape}, dtype {table.dtype}, {max_tokens}, "
                f"max_samples={max_samples})",
                found="lengths needs one integer >= 0 per sample, and the limits must be at least 1",
                fix="shoal.TokenBudget([len(text) for text in texts], 8192)",
            )
        self._lengths = table.astype(np.int64)
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self._padded = padded

    def __call__(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return how many of `indices` fit into the budget, at least one."""
        if int(indices.max()) >= len(self._lengths):
            raise DataError(
                given=f"TokenBudget of {len(self._lengths):,} lengths",
                found=f"the order contains sample {int(indices.max()):,}",
                fix="pass one length per sample: print(len(lengths), len(dataset))",
            )
        lengths = self._lengths[indices]
        if self._padded:
            tokens = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        else:
            tokens = np.cumsum(lengths)
        return max(1, int(np.searchsorted(tokens, self.max_tokens, side="right")))
