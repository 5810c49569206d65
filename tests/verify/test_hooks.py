from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
)

import shoal
from shoal.data.feed import PositionedSource
from shoal.data.iterable_dataset import StreamSource
from shoal.data.map_dataset import MapStyleDataset
from shoal.data.orders import Shuffled
from shoal.data.sampler import LocalBatch, PositionRange, RankSampler
from shoal.tools.verify.hooks import Observer, observe_loaders
from shoal.tools.verify.observations import ObserverOptions
from shoal.tools.verify.observed_calls import keep_process_groups
from shoal.tools.verify.operation_trace import plain_name


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    options = ObserverOptions(folder=str(tmp_path), root=str(Path(__file__).parent), stop_after=9)
    return Observer(options, 0)


def events(observer: Observer, kind: str) -> list[Any]:
    lines = next(Path(observer.options.folder).glob("*.jsonl")).read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        (SubsetRandomSampler([3, 1]), 2),
        (DistributedSampler(range(9), num_replicas=2, rank=0), 9),  # type: ignore[arg-type]
        (None, 9),
    ],
)
def test_an_epoch_has_the_samples_that_its_sampler_is_for(
    observer: Observer, sampler: Sampler[int] | None, size: int
) -> None:
    observer.loader_built(DataLoader(torch.arange(9), sampler=sampler))  # type: ignore[arg-type]
    (record,) = events(observer, "loader")
    assert record["size"] == size
    assert record["line"].startswith("test_hooks.py:")


def test_loaders_are_numbered_by_the_lines_that_build_them(observer: Observer) -> None:
    def build() -> None:
        observer.loader_built(DataLoader(torch.arange(9)))  # type: ignore[arg-type]

    for _ in range(2):
        build()
    build()
    (first, *_), (second, *_), (other, *_) = keys = [e["loader"] for e in events(observer, "loader")]
    assert [number for _, number in keys] == [1, 2, 1]
    assert first == second != other
    assert all(place.startswith("test_hooks.py:") for place, _ in keys)


def test_padding_samples_of_a_local_batch_are_not_counted(observer: Observer) -> None:
    sampler = RankSampler(
        order=Shuffled(3, shuffle=False),
        batch_size=3,
        ranks=2,
        rank=1,
        micro_batches=2,
        seed=0,
        drop_last=False,
    )
    feed = PositionedSource(MapStyleDataset([5, 6, 7], list), sampler, shuffle=False)
    observer.source_built(feed)
    cells = (PositionRange(2, 3, 1.0), PositionRange(0, 1, 0.0))
    observer.local_batch_consumed(feed, LocalBatch(3, 3, cells, np.array([2, 0])))
    (batch,) = events(observer, "batch")
    assert (batch["epoch"], batch["indices"]) == (1, [2])
    assert [event["epoch"] for event in events(observer, "complete")] == [1]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    "dataset",
    [
        Numbers(),
        shoal.ShardedDataset([range(2), range(2, 5)], lambda shard, start: shard[start:], interleave=1),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_streams_and_shards_are_numbered_in_their_epoch(
    observer: Observer,
    monkeypatch: pytest.MonkeyPatch,
    world: shoal.World,
    dataset: object,
    workers: int,
) -> None:
    for kind in (PositionedSource, StreamSource):
        for method in ("__init__", "consumed"):
            monkeypatch.setattr(kind, method, getattr(kind, method))  # restored at the end
    observe_loaders(observer)
    loader = shoal.Loader(dataset, world, batch_size=2, shuffle=False, num_workers=workers)
    read = [value for batch in loader.epochs(2) for micro in batch for value in micro.tolist()]
    assert read == [*range(5), *range(5)]
    batches = [(each["epoch"], each["indices"]) for each in events(observer, "batch")]
    assert batches == [(epoch, part) for epoch in (0, 1) for part in ([0, 1], [2, 3], [4])]
    assert [event["epoch"] for event in events(observer, "complete")] == [0, 1]
    record = events(observer, "loader")[-1]
    assert record["size"] == 5
    assert record["line"] == events(observer, "loader")[0]["line"]


@pytest.mark.parametrize("name", ["module.0.weight", "_forward_module.module.0.weight"])
def test_names_are_those_of_the_users_model(name: str) -> None:
    assert plain_name(name) == "0.weight"
    assert plain_name("body.module.weight") == "body.module.weight"
    assert plain_name("module") == ""


def test_a_process_group_that_a_script_destroys_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    keep_process_groups()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert group() is not None
