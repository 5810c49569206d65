from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import shoal
from helpers.commands import wait_for
from helpers.loaders import seen
from shoal.data.loader_arguments import check_sizes
from shoal.telemetry.step_timer import OTHER
from shoal.util.errors import DataError

SIZE, BATCH = 23, 4


class Rows(Dataset[Any]):
    """Samples that say which process read them and which random number it drew."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int, Tensor]:
        worker = get_worker_info()
        return index, os.getpid() if worker else 0, torch.rand(()) if worker else torch.zeros(())


TENSORS = (torch.arange(SIZE), torch.arange(SIZE) * 2.0)


def build(world: shoal.World, dataset: Any = TENSORS, **options: Any) -> shoal.Loader:
    return shoal.Loader(dataset, world, batch_size=BATCH, seed=3, **options)


def test_epochs_are_counted_from_the_start_of_training(world: shoal.World) -> None:
    loader = build(world)
    separate = seen(loader, 1)
    assert (loader.epoch, loader.position) == (1, SIZE)
    assert seen(loader, 1) == []
    separate += seen(loader, 2)
    assert separate == seen(build(world), 2)


@pytest.mark.parametrize("drop_last", [False, True])
def test_sizes_and_the_ends_of_epochs(world: shoal.World, drop_last: bool) -> None:
    loader = build(world, drop_last=drop_last)
    sizes = [4] * 5 if drop_last else [4] * 5 + [3]
    assert (len(loader), loader.batch_size, loader.epoch_size) == (len(sizes), 4, sum(sizes))
    found = [(batch.size, batch.ends_epoch) for batch in loader.epochs(2)]
    assert found == [(size, n == len(sizes)) for n, size in enumerate(sizes, 1)] * 2


def test_a_batch_says_where_it_is(world: shoal.World) -> None:
    loader = build(world, micro_batches=3)
    batches = list(loader.epochs(1))
    assert [(batch.first, batch.size, len(batch)) for batch in batches[-2:]] == [(16, 4, 3), (20, 3, 3)]
    cuts = [(micro.first, micro.samples, micro.weight) for micro in batches[0].micros]
    assert cuts == [(0, 1, 1), (1, 1, 1), (2, 2, 1)]
    assert batches[-1].share == (20, 23)
    assert loader.batch is batches[-1]
    assert all(batch.seed == 3 and batch.wait >= 0 for batch in batches)


def draws(loader: shoal.Loader, epochs: int) -> list[tuple[int, float]]:
    """The process and the random number of each sample."""
    parts = [(micro[1], micro[2]) for batch in loader.epochs(epochs) for micro in batch]
    return [pair for pids, drawn in parts for pair in zip(pids.tolist(), drawn.tolist(), strict=True)]


def test_workers_live_through_a_loop_and_draw_otherwise_in_the_next(world: shoal.World) -> None:
    loader = build(world, Rows(), num_workers=2)
    first, second = draws(loader, 1), draws(loader, 3)
    assert len({pid for pid, _ in second}) == 2
    assert len({number for _, number in (*first, *second)}) == 3 * SIZE
    again = draws(build(world, Rows(), num_workers=2), 1)
    assert [number for _, number in again] == [number for _, number in first]


@pytest.mark.parametrize("stop", [2, None])
def test_no_worker_and_no_thread_is_left(world: shoal.World, stop: int | None) -> None:
    threads = set(threading.enumerate())
    loader = build(world, Rows(), num_workers=2)
    seen(loader, 2, stop)
    wait_for(lambda: not multiprocessing.active_children())
    wait_for(lambda: set(threading.enumerate()) <= threads)


def test_a_sample_that_fails_leaves_time_to_the_script(world: shoal.World) -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise LookupError

    before = world.timeline.enter(OTHER)
    with pytest.raises(LookupError):
        seen(build(world, Broken()), 1)
    assert world.timeline.enter(before) == OTHER


def test_a_state_of_other_data_is_refused(world: shoal.World) -> None:
    options: dict[str, Any] = {"dataset": torch.arange(SIZE), "batch_size": BATCH, "seed": 3}
    state = shoal.Loader(world=world, **options).state_dict()
    others: dict[str, dict[str, Any]] = {
        "a dataset of 23 samples": {"dataset": torch.arange(SIZE - 1)},
        "seed 3": {"seed": 4},
        "shuffle=True": {"shuffle": False},
        "epochs of 23 samples": {"drop_last": True},
    }
    for found, other in others.items():
        loader = shoal.Loader(world=world, **(options | other))
        with pytest.raises(DataError, match=f"written with {found}"):
            loader.load_state_dict(state)
        assert loader.position == 0


def test_batches_that_cannot_be_cut() -> None:
    wrong: list[tuple[Any, int, int]] = [(0, 1, 1), (-4, 1, 1), (4.0, 1, 1), (4, 0, 1)]
    for sizes in wrong:
        with pytest.raises(DataError, match="is an integer, 1 or more"):
            check_sizes(*sizes)
    for batch_size, micros, ranks in ((3, 1, 4), (7, 4, 2)):
        with pytest.raises(DataError, match=f"{ranks} x {micros} micro-batches: 1 of them"):
            check_sizes(batch_size, micros, ranks)


def test_a_dataset_smaller_than_a_batch(world: shoal.World) -> None:
    loader = shoal.Loader(torch.arange(3), world, batch_size=8)
    assert [batch.size for batch in loader.epochs(2)] == [3, 3]
    with pytest.raises(DataError, match="an epoch has no full batch"):
        shoal.Loader(torch.arange(3), world, batch_size=8, drop_last=True)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_position_after_so_many_steps_is_where_they_lead(
    world: shoal.World, drop_last: bool
) -> None:
    positions = [0]
    ahead = []
    loader = build(world, drop_last=drop_last)
    for _ in loader.epochs(4):
        positions.append(loader.position)
        ahead.append([loader.after(steps) for steps in range(8)])
    whole = [found for found in ahead if found[-1] <= positions[-1]]
    assert len(whole) > 12
    assert whole == [positions[taken + 1 : taken + 9] for taken in range(len(whole))]


def test_a_loop_over_epochs_has_a_goal_where_their_length_is_known(world: shoal.World) -> None:
    assert build(world).goal is None
    loader = build(world)
    loader.epochs(3)
    assert loader.goal == 3 * SIZE
    endless = shoal.Loader(Endless(), world, batch_size=BATCH)
    endless.epochs(3)
    assert endless.goal is None
    assert endless.after(5) == 5 * BATCH


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Slow(Rows):
    """Each sample takes 2 ms at least."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


class Flowing(IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        for index in range(SIZE):
            time.sleep(0.002)
            yield index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Slow(), Flowing()], ids=["rows", "stream"])
def test_how_long_a_batch_took_is_known_however_it_was_made(
    world: shoal.World, dataset: Any, workers: int
) -> None:
    loader = build(world, dataset, num_workers=workers)
    assert loader.workers == (min(1, workers) if isinstance(dataset, Flowing) else workers)
    # A stream is read a batch ahead, so only the sum is that of the same samples.
    assert sum(loader.load for _ in loader.epochs(1)) >= 0.002 * SIZE


def test_batches_that_are_made_together_share_the_time(world: shoal.World) -> None:
    loader = build(world)
    loads = {loader.load for _ in loader.epochs(1)}
    assert len(loads) == 1
    assert loads.pop() > 0
