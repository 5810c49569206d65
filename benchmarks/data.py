"""Loading: samples a second, and seconds to the first batch after a resume, for several loaders.

    python benchmarks/data.py [--rounds 5] [--samples 1000000 100000000] [--workers 0 1 2] [--json]

Loaders: torch's DataLoader, and each of torchdata's StatefulDataLoader, Accelerate (its
skip_first_batches) and Grain that is installed (the extra `bench`). Datasets: `memory` (tensors),
`file` (rows of a memory-mapped file), `slow` (1 ms a sample). A round runs each loader once, in an
order that rotates; ratios to the DataLoader are taken within rounds. Training resumes at 90 % of an
epoch. torch's DataLoader can't skip and reads up to there, which is left out if it would take too long.
All loaders give shuffled batches of the same size from one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal

WIDTH = 8
BATCH = 256
SLOW_BATCH = 32
SLOW_SIZE = 2_000
REPLAYED = 2_000_000
"""For loaders that resume by reading all samples before, larger datasets are left out."""
REPLAYS = ("torch", "torchdata")

STATES: dict[Any, Any] = {}
"""States of StatefulDataLoader, at 90 % of each case's epoch."""


class Rows(Dataset[Any]):
    """Rows of a file, by a memory map that each process opens for itself."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._rows: Any = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if self._rows is None:
            self._rows = np.memmap(self._path, np.uint8, "r", shape=(self._size, WIDTH))
        return torch.from_numpy(np.array(self._rows[index]))


class Slow(Dataset[Any]):
    """A dataset in which a sample takes a millisecond of waiting."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return torch.full((WIDTH,), index % 251, dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    """The data, its size and the loader's options."""

    kind: str
    size: int
    workers: int
    data: Any
    world: shoal.World

    @property
    def batch(self) -> int:
        return SLOW_BATCH if self.kind == "slow" else BATCH

    @property
    def options(self) -> dict[str, Any]:
        return {"batch_size": self.batch, "num_workers": self.workers}

    @property
    def begin(self) -> int:
        """The batch at which training resumes: at 90 % of the epoch."""
        return self.size * 9 // 10 // self.batch


Begin = Callable[[Case, int], Iterable[Any]]
"""Starts a loader at a batch of the first epoch."""


def through_shoal(case: Case, begin: int) -> Iterable[Any]:
    loader = shoal.Loader(case.data, case.world, **case.options)
    loader.load_state_dict(loader.state_dict() | {"position": begin * case.batch})
    return loader.epochs(1)


def as_dataset(data: Any) -> Any:
    return TensorDataset(data) if isinstance(data, torch.Tensor) else data


def through_torch(case: Case, begin: int) -> Iterable[Any]:
    return itertools.islice(
        DataLoader(as_dataset(case.data), shuffle=True, **case.options), begin, None
    )


def through_torchdata(case: Case, begin: int) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def build() -> Any:
        return StatefulDataLoader(as_dataset(case.data), shuffle=True, **case.options)

    if not begin:
        return build()  # type: ignore[no-any-return]
    key = (case.kind, case.size, case.workers)
    if key not in STATES:  # it must be reached once, which is not timed
        reaching = build()
        for _ in itertools.islice(reaching, begin):
            pass
        STATES[key] = reaching.state_dict()
    loader = build()
    loader.load_state_dict(STATES[key])
    return loader  # type: ignore[no-any-return]


def through_accelerate(case: Case, begin: int) -> Iterable[Any]:
    from accelerate import Accelerator, skip_first_batches

    data = as_dataset(case.data)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, shuffle=True, **case.options))
    return skip_first_batches(loader, begin) if begin else loader  # type: ignore[no-any-return]


def through_grain(case: Case, begin: int) -> Iterable[Any]:
    import grain.python as grain

    samples = grain.MapDataset.source(case.data).shuffle(seed=0)
    batches = samples.batch(case.batch, batch_fn=torch.stack)[begin:]
    # Threads in place of processes: its worker processes need a program of absl.
    threads = grain.ReadOptions(num_threads=case.workers, prefetch_buffer_size=4 * case.workers)
    return batches.to_iter_dataset(threads)  # type: ignore[no-any-return]


def contenders() -> dict[str, Begin]:
    found: dict[str, tuple[str, Begin]] = {
        "torch": ("torch", through_torch),
        "shoal": ("torch", through_shoal),
        "torchdata": ("torchdata", through_torchdata),
        "accelerate": ("accelerate", through_accelerate),
        "grain": ("grain", through_grain),
    }
    return {who: begin for who, (needs, begin) in found.items() if importlib.util.find_spec(needs)}


def cases(world: shoal.World, folder: Path, sizes: list[int], workers: list[int]) -> Iterator[Case]:
    for size in sizes:
        path = folder / f"rows-{size}"
        with path.open("wb") as file:
            file.truncate(
                size * WIDTH
            )  # sparse: its pages are zeros, and cost what others cost once read
        memory = torch.zeros(size, WIDTH, dtype=torch.uint8)
        for number in workers:
            yield Case("memory", size, number, memory, world)
            yield Case("file", size, number, Rows(path, size), world)
        path.unlink()
    for number in workers:
        yield Case("slow", SLOW_SIZE, number, Slow(SLOW_SIZE), world)


def throughput(case: Case, begin: Begin, seconds: float) -> float:
    """Return samples a second after the first batch, over `seconds` or the rest of an epoch."""
    batches = iter(begin(case, 0))
    next(batches)
    started = time.perf_counter()
    count = 0
    for _ in batches:
        count += 1
        if time.perf_counter() - started > seconds:
            break
    return count * case.batch / (time.perf_counter() - started)


def resuming(case: Case, begin: Begin) -> float:
    """Return the seconds from nothing to the first batch at 90 % of an epoch."""
    started = time.perf_counter()
    next(iter(begin(case, case.begin)))
    return time.perf_counter() - started


def measure(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    loaders = contenders()
    rates: dict[str, list[float]] = {who: [] for who in loaders}
    resumes: dict[str, list[float]] = {who: [] for who in loaders}
    for who in set(loaders) & {"torchdata"}:
        if case.size <= REPLAYED:
            resuming(case, loaders[who])  # reaches its state
    for number in range(rounds):
        turn = number % len(loaders)
        names = list(loaders)
        for who in names[turn:] + names[:turn]:
            rates[who].append(throughput(case, loaders[who], seconds))
            if case.size <= REPLAYED or who not in REPLAYS:
                resumes[who].append(resuming(case, loaders[who]))
    return {
        "kind": case.kind,
        "samples": case.size,
        "workers": case.workers,
        "samples_per_second": {who: statistics.median(found) for who, found in rates.items()},
        "resume_seconds": {who: statistics.median(found) for who, found in resumes.items() if found},
        "ratios": {
            who: statistics.median(a / b for a, b in zip(found, rates["torch"], strict=True))
            for who, found in rates.items()
        },
    }


def show(figures: dict[str, Any]) -> None:
    print(f"\n{figures['kind']}, {figures['samples']:,} samples, {figures['workers']} worker(s)")
    print(f"  {'':<12}{'samples/s':>12}{'to torch':>10}{'resume, ms':>12}")
    for who, rate in figures["samples_per_second"].items():
        resume = figures["resume_seconds"].get(who)
        shown = "-" if resume is None else f"{resume * 1e3:,.1f}"
        print(f"  {who:<12}{rate:>12,.0f}{figures['ratios'][who]:>10.2f}{shown:>12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000_000, 100_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory() as folder, shoal.init(device="cpu") as world:
        for case in cases(world, Path(folder), options.samples, options.workers):
            figures.append(measure(case, options.rounds, options.seconds))
            show(figures[-1])
    if options.json:
        print(json.dumps({"data": figures}))


if __name__ == "__main__":
    main()
