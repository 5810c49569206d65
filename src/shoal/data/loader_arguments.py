"""Checks of the arguments of a Loader, and what depends on virtual ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shoal.data.map_dataset import BlockDataset
from shoal.data.sampler import RankSampler
from shoal.data.token_budget import BatchSize
from shoal.distributed.world import World
from shoal.util.arguments import check_choice, check_integer
from shoal.util.errors import DataError

MEASURED = "measured"
SHARES = ("equal", MEASURED)


def check_shares(shares: object, dataset: object, world: World) -> None:
    """Raise DataError for a value of `shares`, or a dataset or World that it does not fit."""
    check_choice(DataError, "Loader", "shares", shares, SHARES)
    if shares == MEASURED and world.virtual_ranks is not None:
        raise DataError(
            given="Loader(…, shares='measured') with exact='bits'",
            found="the number of ranks alone defines which virtual ranks a rank computes",
            fix="leave shares out, or exact='bits'",
        )
    if shares == MEASURED and isinstance(dataset, IterableDataset):
        raise DataError(
            given="Loader(IterableDataset, …, shares='measured')",
            found="batches that were read ahead can't be split again without random access",
            fix="use a map-style dataset or a ShardedDataset, or leave shares out",
        )


def check_world(dataset: Any, world: object) -> World:
    """Return the second argument of a Loader; raises DataError if it is not a World."""
    if not isinstance(world, World):
        raise DataError(
            given=f"Loader({type(dataset).__name__}, {type(world).__name__}, …)",
            found="the second argument is the World that shoal.init returns",
            fix="shoal.Loader(dataset, world, batch_size=64)",
        )
    return world


def check_seed(shuffle: object, seed: object) -> int:
    """Return the seed of the order. Raise DataError unless it is an integer and `shuffle` a boolean."""
    if not isinstance(shuffle, bool):
        raise DataError(
            given=f"Loader(shuffle={shuffle!r})", found="shuffle is a boolean", fix="shuffle=False"
        )
    return check_integer(DataError, "Loader", "seed", seed, -(2**63))


def check_sizes(
    batch_size: int | BatchSize, micro_batches: int, ranks: int
) -> tuple[int | BatchSize, int]:
    """Return both arguments as integers. Raise DataError if a batch cannot fill every micro-batch."""
    largest = getattr(batch_size, "max_samples", batch_size)
    check_integer(DataError, "Loader", "batch_size", largest, 1, usual=512)
    micro_batches = check_integer(DataError, "Loader", "micro_batches", micro_batches, 1)
    if not isinstance(batch_size, int | np.integer):
        return batch_size, micro_batches
    if batch_size < ranks * micro_batches:
        raise DataError(
            given=f"batch_size={batch_size}, micro_batches={micro_batches}, on {ranks} data rank(s)",
            found=f"{batch_size} sample(s) for {ranks} x {micro_batches} micro-batches: "
            f"{ranks * micro_batches - batch_size} of them would never get a sample",
            fix=f"batch_size={ranks * micro_batches} or more, counted over all ranks",
        )
    return int(batch_size), micro_batches


def check_partners(partners: int, largest: int) -> int:
    """Return the number of partners. Raise DataError if a full batch has fewer other samples."""
    return check_integer(DataError, "Loader", "partners", partners, most=largest - 1, usual=1)


def fixed_size(batch_size: int | BatchSize, order: Any) -> int:
    """Return the batch size of an IterableDataset; raises DataError if it is not constant."""
    if order is None and isinstance(batch_size, int):
        return batch_size
    raise DataError(
        given="Loader(IterableDataset, …) with order= or a batch_size that varies",
        found="an IterableDataset has no random access",
        fix="use a map-style dataset, or yield the samples in the order that you want",
    )


def check_epoch(sampler: RankSampler, samples: BlockDataset, drop_last: bool) -> None:
    """Raise DataError for `drop_last` with batches that vary in size, or an epoch without batches."""
    if drop_last and not sampler.fixed:
        raise DataError(
            given=f"batch_size={type(sampler.batch_size).__name__}, drop_last=True",
            found="batches vary in size, so no batch is short",
            fix="leave drop_last out",
        )
    if sampler.epoch_size == 0:
        raise DataError(
            given=f"batch_size={sampler.largest}, drop_last={drop_last}",
            found=f"the dataset has {samples.size} samples and the order {len(sampler.order)}: an "
            "epoch has no full batch, and drop_last=True leaves the other ones out",
            fix="use a smaller batch_size, or drop_last=False, which is exact too",
        )


def check_fetch(device: torch.device, num_workers: int, pin_memory: bool) -> None:
    """Raise DataError for a wrong number of workers, or samples that workers cannot read."""
    check_integer(DataError, "Loader", "num_workers", num_workers, usual=4)
    if device.type != "cpu" and (num_workers or pin_memory):
        raise DataError(
            given=f"Loader(tensors on {device}, num_workers={num_workers}, pin_memory={pin_memory})",
            found="worker processes can't read device memory, and only host memory can be pinned",
            fix="use num_workers=0 without pin_memory, because the tensors are already loaded; or "
            "call tensor.cpu()",
        )


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
