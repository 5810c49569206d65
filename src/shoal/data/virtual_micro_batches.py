"""Micro-batches that are virtual ranks: checks of a Loader's arguments, and copies of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shoal.distributed.world import World
from shoal.util.errors import DataError


def parts_of(dataset: object, micro_batches: object, world: World) -> int:
    """Return the number of ranks, or of virtual ranks, that a batch is cut for.

    Raises DataError for arguments that do not fit virtual ranks.
    """
    virtual = world.virtual_ranks
    if virtual is None:
        return world.data_size
    if isinstance(dataset, IterableDataset):
        raise DataError(
            given="Loader(IterableDataset, …) with exact='bits'",
            found="a stream without random access is not cut into virtual ranks",
            fix="use a map-style dataset or a ShardedDataset, or leave exact out",
        )
    if micro_batches != 1:
        raise DataError(
            given=f"Loader(…, micro_batches={micro_batches!r}) with exact='bits'",
            found=f"each of {virtual.total} virtual ranks is one micro-batch already",
            fix=f"for smaller ones, shoal.init(exact='bits', virtual_ranks={2 * virtual.total})",
        )
    return virtual.total


def copied(tensor: Tensor, _: torch.device) -> Tensor:
    """Return a copy with memory of its own, whose alignment does not depend on the batch."""
    return tensor.clone()
