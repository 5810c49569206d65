"""The global batch in, this rank's share out: exact at any number of ranks, resumable anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from shoal.batch import Batch
from shoal.data.prefetch import on_device
from shoal.data.sampler import Sampler, Share
from shoal.data.source import Collate, source
from shoal.errors import DataError
from shoal.task import Micro
from shoal.world import World


class Loader:
    """Cuts a dataset into global batches and gives each rank its share of each.

    `dataset` is a tensor, an array, a tuple or dict of them, or any map-style dataset (of torch, of
    Hugging Face). `batch_size` counts the samples of a *global* batch, over all ranks and
    micro-batches. The order of an epoch depends on (seed, epoch) only; `seed` is the world's unless
    given. The rest is torch's DataLoader, on which it stands: `collate_fn`, `num_workers` (kept for
    all epochs), `prefetch_factor`, `pin_memory` (on CUDA unless given).

    Its state is one number: the position, in samples since the start of training.

        >>> with shoal.init() as world:
        ...     loader = Loader(torch.arange(10), world, batch_size=4, shuffle=False)
        ...     [micro.tolist() for batch in loader.epochs(1) for micro in batch]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        batch_size: int,
        micro_batches: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        batch_size, micro_batches = check_sizes(batch_size, micro_batches, world.data_size)
        self.world = world
        self._source = source(dataset, collate_fn, -(-batch_size // world.data_size))
        self._sampler = Sampler(
            size=len(self._source),
            batch_size=batch_size,
            ranks=world.data_size,
            rank=world.data_rank,
            micro_batches=micro_batches,
            seed=world.seed if seed is None else seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        if self._sampler.epoch_size == 0:
            raise DataError(
                given=f"batch_size={batch_size}, drop_last=True",
                found=f"a dataset of {len(self._source)} samples: every batch would be dropped",
                fix="a smaller batch_size, or drop_last=False, which is exact too",
            )
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = world.device.type == "cuda" if pin_memory is None else pin_memory
        self.position = 0
        self.last: Batch | None = None

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return math.ceil(self._sampler.epoch_size / self._sampler.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.position // self._sampler.epoch_size

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self._sampler.batch_size

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return self._sampler.epoch_size

    def epochs(self, count: int) -> Iterator[Batch]:
        """The batches up to the end of epoch `count`, counted from the start of training.

        After a restore it goes on in mid-epoch with the next sample that was not consumed.
        """
        until = count * self._sampler.epoch_size
        seed = self._sampler.seed
        begun = time.perf_counter()
        for share, values in on_device(self._shares(until), self.world.device):
            micros = [
                Micro(value, share.first + start, stop - start, weight, self.world)
                for value, (start, stop, weight) in zip(values, share.cells, strict=True)
            ]
            wait = time.perf_counter() - begun
            batch = Batch(share.first, share.size, micros, seed=seed, wait=wait, world=self.world)
            self.position = share.first + share.size
            self.last = batch
            yield batch
            begun = time.perf_counter()

    def _shares(self, until: int) -> Iterator[tuple[Share, list[Any]]]:
        blocks = _Blocks(self._sampler, self.position, until, self._source.block)
        loader: DataLoader[list[list[Any]]] = DataLoader(
            self._source,
            batch_size=None,
            sampler=blocks,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor if self._num_workers else None,
            pin_memory=self._pin_memory,
            generator=_cpu_generator(self.world, self.position),
        )
        for values in loader:
            yield from zip(blocks.sent.pop(0), values, strict=True)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it would mean nothing without."""
        sampler = self._sampler
        return {
            "position": self.position,
            "size": sampler.size,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "epoch_size": sampler.epoch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position; DataError if the data or its order are not the same."""
        self.check_state(state)
        self.position = state["position"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if `state` is of other data or another order; nothing changes."""
        here = self.state_dict()
        names = {
            "size": "a dataset of {:,} samples",
            "seed": "seed {}",
            "shuffle": "shuffle={}",
            "epoch_size": "epochs of {:,} samples (drop_last, batch_size)",
        }
        for key, text in names.items():
            if state[key] != here[key]:
                raise DataError(
                    given="a Loader with " + text.format(here[key]),
                    found=f"a checkpoint written with {text.format(state[key])}: samples would be "
                    "repeated or missed",
                    fix="train on the same data in the same order, or start afresh in another run "
                    "directory: shoal.Run('runs/b', …)",
                )


class _Blocks:
    """The sampler as torch's DataLoader wants it, keeping the blocks that are under way."""

    def __init__(self, sampler: Sampler, position: int, until: int, block: int) -> None:
        self._arguments = (sampler, position, until, block)
        self.sent: list[list[Share]] = []

    def __iter__(self) -> Iterator[list[Share]]:
        sampler, position, until, block = self._arguments
        for shares in sampler.shares(position, until, block):
            self.sent.append(shares)
            yield shares


def check_sizes(batch_size: int, micro_batches: int, ranks: int) -> tuple[int, int]:
    """Both as plain integers; refuses batches that can't be cut into ranks x micro-batches."""
    sizes = (batch_size, micro_batches)
    if not all(isinstance(n, int | np.integer) and n is not True and n > 0 for n in sizes):
        raise DataError(
            given=f"batch_size={batch_size!r}, micro_batches={micro_batches!r}",
            found="both must be positive whole numbers",
            fix="for example batch_size=512, micro_batches=4",
        )
    if batch_size < ranks * micro_batches:
        raise DataError(
            given=f"batch_size={batch_size}, micro_batches={micro_batches}, on {ranks} data rank(s)",
            found=f"{batch_size} sample(s) for {ranks} x {micro_batches} micro-batches: "
            f"{ranks * micro_batches - batch_size} of them would never get one",
            fix=f"batch_size={ranks * micro_batches} or more: it counts all ranks together",
        )
    return int(batch_size), int(micro_batches)


def _as_it_is(value: Any) -> Any:
    return value


def _cpu_generator(world: World, position: int) -> torch.Generator:
    # By position, so that what workers draw does not repeat in a later loop or after a resume.
    return torch.Generator().manual_seed(world.seed_for(f"workers from sample {position}"))
