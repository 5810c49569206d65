"""A thousand shards, killed and resumed on other numbers of ranks and workers: each sample once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import shoal
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes

SHARDS = 1000
EPOCHS = 2
STEPS = 24
"""In an epoch, about; a checkpoint is saved at every eighth."""


class Attempt(NamedTuple):
    """One attempt at the run; rank 0 dies after step `dies`."""

    number: int
    directory: Path
    longest: int
    workers: int
    counted: bool
    dies: int | None


class Read:
    """Reads numbered samples of shards from 3 to `longest` samples."""

    def __init__(self, longest: int) -> None:
        self.lengths = np.random.default_rng(7).integers(3, longest + 1, SHARDS).tolist()
        self._starts = [0, *np.cumsum(self.lengths).tolist()]

    def __call__(self, shard: int, start: int) -> Iterator[int]:
        yield from range(self._starts[shard] + start, self._starts[shard + 1])

    @property
    def size(self) -> int:
        return int(sum(self.lengths))


class Flowing(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self._size)


def stream(attempt: Attempt) -> Any:
    read = Read(attempt.longest)
    lengths = None if attempt.counted else read.lengths
    return shoal.ShardedDataset(range(SHARDS), read, lengths=lengths)


def flow(attempt: Attempt) -> Any:
    return Flowing(Read(attempt.longest).size)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.sum(), len(batch)


def inputs(batch: Tensor) -> Tensor:
    return batch[:, None] / 1e6


def train(world: shoal.World, attempt: Attempt, data: Any) -> None:
    """Train, and write down which samples each step took."""
    # Daemons may not have workers; these end by themselves when their rank is gone.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = shoal.parallelize(nn.Linear(1, 1), world)
    task = shoal.Task(loss, inputs=inputs)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-6), task)
    batch_size = Read(attempt.longest).size // STEPS
    loader = shoal.Loader(data(attempt), world, batch_size=batch_size, num_workers=attempt.workers)
    seen = attempt.directory / f"seen-{attempt.number}-{world.rank}.jsonl"
    with shoal.Run(attempt.directory, step, loader) as run, seen.open("w") as file:
        run.restore()
        for batch in loader.epochs(EPOCHS):
            step(batch)
            samples = [int(i) for m in batch.micros if m.weight for i in m.value]
            file.write(json.dumps([step.number, loader.position - batch.size, samples]) + "\n")
            file.flush()
            if world.is_rank_zero and step.number == attempt.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            run.tick(every=8)
        run.save()


def each_epoch(directory: Path, size: int) -> list[Counter[int]]:
    """How often each epoch had each sample, by the last attempt that took a step."""
    last: dict[int, tuple[int, list[list[int]], int]] = {}
    for path in sorted(directory.glob("seen-*.jsonl")):
        attempt = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            step, first, samples = json.loads(line)
            before, parts, _ = last.get(step, (-1, [], 0))
            parts = parts if attempt == before else []
            last[step] = attempt, [*parts, samples], first
    epochs: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for _, parts, first in last.values():
        epochs[first // size].update(sample for part in parts for sample in part)
    return epochs


@pytest.mark.full
@pytest.mark.parametrize(
    ("chain", "longest", "counted", "data"),
    [
        pytest.param([(2, 2), (3, 0), (1, 0)], 20, True, stream, id="counted"),
        pytest.param([(3, 2), (2, 0)], 10, False, flow, id="iterable"),
        pytest.param([(1, 0), (2, 2), (4, 0), (3, 2)], 400, False, stream, id="long"),
    ],
)
def test_each_sample_once(
    tmp_path: Path, chain: list[tuple[int, int]], longest: int, counted: bool, data: Any
) -> None:
    for number, (ranks, workers) in enumerate(chain):
        dies = None if number == len(chain) - 1 else 13 + 11 * number
        attempt = Attempt(number, tmp_path, longest, workers, counted, dies)
        with Ranks(ranks) as started:
            ended = started.call_until_killed(train, attempt, data)
        assert (ended is None) == (dies is not None)
    size = Read(longest).size
    assert each_epoch(tmp_path, size) == [Counter(range(size))] * EPOCHS
    coverage = shoal.coverage(tmp_path)
    assert (coverage.exact, coverage.end) == (True, EPOCHS * size)
