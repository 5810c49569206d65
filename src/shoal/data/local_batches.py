"""A Loader's local batches as an iterable of one epoch, for tools that own the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.data.batch import Batch
from shoal.data.loader import Loader
from shoal.util.errors import DataError


class LocalBatches:
    """Iterable over the local batches of the next epoch, for Lightning, Trainer and other tools.

    Each iteration yields what the collate function returned for this rank, on the device of the World,
    up to the end of the epoch. The Loader divides samples over ranks, so turn off the sampler that the
    tool would add: `Trainer(use_distributed_sampler=False)` in Lightning.

    Args:
        loader: Loader with one micro-batch.

    Raises:
        DataError: If `loader` is not a Loader; when iterating, if it has several micro-batches.

    Attributes:
        loader: The Loader.
        batch: The global batch whose part was yielded last, for `batch.averaged`; None before.

    Examples:
        >>> import torch
        >>> with shoal.init() as world:
        ...     loader = shoal.Loader((torch.arange(6.0),), world, batch_size=4, shuffle=False)
        ...     batches = shoal.LocalBatches(loader)
        ...     print(len(batches), [len(x) for (x,) in batches])
        2 [4, 2]
    """

    def __init__(self, loader: Loader) -> None:
        if not isinstance(loader, Loader):
            raise DataError(
                given=f"shoal.LocalBatches({type(loader).__name__})",
                found="it is not a shoal.Loader",
                fix="shoal.LocalBatches(shoal.Loader(dataset, world, batch_size=64))",
            )
        self.loader = loader
        self.batch: Batch | None = None

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the local batches up to the end of the current epoch."""
        for batch in self.loader.epochs(self.loader.epoch + 1):
            if len(batch) > 1:
                raise DataError(
                    given=f"shoal.LocalBatches of a Loader with {len(batch)} micro-batches",
                    found="the tool would take a step after each of them",
                    fix="leave micro_batches out, and let the tool accumulate gradients",
                )
            self.batch = batch
            yield from batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Loader, which counts the samples of yielded batches.

        Returns:
            A dict of plain values, the same on all ranks.
        """
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks.

        Args:
            state: State that `state_dict` returned.

        Raises:
            DataError: If the data or their order differ.
        """
        self.loader.load_state_dict(state)
