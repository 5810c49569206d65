"""Measurements of the input pipeline alone: its speed by workers, and the cost of each stage."""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import psutil
from torch.utils.data import DataLoader, Dataset

from shoal.data import Loader
from shoal.data.batch import Batch
from shoal.data.feed import PositionedSource
from shoal.data.map_dataset import SampleSource
from shoal.distributed.to_device import move
from shoal.tools.bench.measurement import time_calls
from shoal.util import accelerator
from shoal.util.clock import CLOCK

_LEAST_BATCHES = 2
_ENDLESS = 10**9
_HANDED = 64


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Batches taken at full speed.

    `first` is the seconds until the first one, including the start of workers; `rate` samples per
    second afterwards; `busy` the cores used by this process, `workers_busy` those used by all its
    workers; `machine` the fraction of the machine's cores that was busy; `memory` the bytes that a
    worker has for itself (None without workers).
    """

    first: float
    rate: float
    samples: int
    busy: float
    workers_busy: float
    machine: float
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The cost of a sample in seconds: each stage alone, in this process except where noted.

    `collate` is None if samples are not collated, `handed` (from a worker to this process) if no worker
    can be started, `copied` (to the GPU) without a GPU.
    """

    sample: float
    collate: float | None
    handed: float | None
    copied: float | None


def run_trial(loader: Loader, workers: int, seconds: float) -> Trial:
    """Take batches for this many seconds."""
    known = _children()
    begun = CLOCK.now()
    ends = begun + seconds
    taking = cast("Generator[Batch, None, None]", loader.fetched_by(workers).epochs(_ENDLESS))
    with contextlib.closing(taking) as batches, warnings.catch_warnings():
        # The measurement itself determines which number is too many.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        next(batches)
        first = CLOCK.now() - begun
        # Workers start together, and the batches that they have made by now arrive at once.
        for _ in range(2 * workers):
            if CLOCK.now() > (begun + ends) / 2:
                break
            next(batches)
        mine = [child for child in _children() if child not in known]
        cpu, theirs, since = CLOCK.process_seconds(), _cpu(mine), CLOCK.now()
        machine = psutil.cpu_times()
        samples = taken = 0
        while taken < _LEAST_BATCHES or CLOCK.now() < ends:
            samples += next(batches).size
            taken += 1
        took = CLOCK.now() - since
        return Trial(
            first=first,
            rate=samples / took,
            samples=samples,
            busy=(CLOCK.process_seconds() - cpu) / took,
            workers_busy=(_cpu(mine) - theirs) / took,
            machine=_machine_busy(machine, psutil.cpu_times()),
            memory=_memory(mine),
        )


def measure_stages(loader: Loader, seconds: float) -> Stages | None:
    """Return the cost of a sample by stage; None for a dataset that can only be iterated.

    The dataset alone and the dataset with the collate function read different blocks in turn, so that
    neither profits from data that the other has just read.
    """
    feed = loader.feed
    if not isinstance(feed, PositionedSource):
        return None
    source, device = feed.source, loader.world.device
    alone: list[float] = []
    whole: list[float] = []
    handed: Any = None
    ends = CLOCK.now() + seconds
    for number, block in enumerate(feed.sampler.shares(0, _ENDLESS, source.block)):
        count = sum(share.size for share in block)
        begun = CLOCK.now()
        if number % 2 and isinstance(source, SampleSource):
            for share in block:
                source.samples(share)
            alone.append((CLOCK.now() - begun) / count)
        else:
            handed = source[block], count
            whole.append((CLOCK.now() - begun) / count)
        if number and CLOCK.now() > ends:
            break
    if len(whole) > 1:
        whole = whole[1:]  # the first one imports, opens and allocates
    both = statistics.median(whole)
    sample = statistics.median(alone) if alone else both
    value, count = handed
    copies = [
        time_calls(lambda: move(value, device), device=device)
        for _ in range(5 * accelerator.is_accelerator(device))
    ]
    return Stages(
        sample=sample,
        collate=max(0.0, both - sample) if alone else None,
        handed=_handed(value, seconds) / count if source.device.type == "cpu" else None,
        copied=statistics.median(copies) / count if copies else None,
    )


class _Ready(Dataset[Any]):
    """A dataset that returns the same value each time, as a new object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __len__(self) -> int:
        return _HANDED

    def __getitem__(self, index: int) -> Any:
        # A tensor that was sent once is in shared memory, and sending it again would cost nothing.
        return copy.deepcopy(self._value)


def _handed(value: Any, seconds: float) -> float:
    """Return the seconds to get a block from a worker that has nothing else to do."""
    loader = DataLoader(_Ready(value), batch_size=None, collate_fn=_as_it_is, num_workers=1)
    ends = CLOCK.now() + seconds
    taken, since = 0, 0.0
    for number, _ in enumerate(loader):
        now = CLOCK.now()
        if number == 2:  # now the worker runs and its queue has its usual length
            since = now
        taken = number - 2
        if now > ends and taken > 0:
            break
    return (now - since) / taken


def _as_it_is(value: Any) -> Any:
    return value


def _children() -> list[psutil.Process]:
    return psutil.Process(os.getpid()).children()


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(times) for times in _each(processes))


def _each(processes: list[psutil.Process]) -> Iterator[tuple[float, float]]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            yield times.user, times.system


def _machine_busy(before: Any, after: Any) -> float:
    """Return the fraction of its cores' time that a machine was busy, between two looks."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    whole = sum(spent.values())
    idle: float = spent["idle"] + spent.get("iowait", 0.0)
    return 1 - idle / whole if whole > 0 else 0.0


def _memory(processes: list[psutil.Process]) -> int | None:
    """Return the bytes that are a worker's alone: pages shared with this process cost nothing."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(process.memory_full_info().uss)
    return int(statistics.median(found)) if found else None
