from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import shoal
from shoal.data.loader_arguments import check_sizes
from shoal.telemetry.step_timer import OTHER
from shoal.util.errors import DataError

SIZE, BATCH = 23, 4
DEADLINE = 100.0


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


def seen(loader: shoal.Loader, epochs: int, stop: int | None = None) -> list[tuple[int, list[int]]]:
    """(first position, dataset indices) of each batch; leaves the loop after `stop` batches."""
    found = []
    for batch in loader.epochs(epochs):
        found.append((batch.first, [int(i) for micro in batch for i in micro[0]]))
        if len(found) == stop:
            break
    return found


@pytest.mark.parametrize("dataset", [TENSORS, Rows()], ids=["tensors", "rows"])
@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"prefetch_factor": 3}])
def test_workers_change_nothing(world: shoal.World, dataset: Any, options: dict[str, Any]) -> None:
    alone = seen(build(world, dataset, **options), 2)
    assert seen(build(world, dataset, num_workers=2, **options), 2) == alone
    assert [first for first, _ in alone] == [*range(0, SIZE, BATCH), *range(SIZE, 2 * SIZE, BATCH)]


def test_every_sample_once_in_each_epoch_and_in_another_order(world: shoal.World) -> None:
    found = [index for _, batch in seen(build(world), 3) for index in batch]
    epochs = [found[start : start + SIZE] for start in (0, SIZE, 2 * SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_a_loop_that_was_left_goes_on_with_the_next_sample(
    world: shoal.World, num_workers: int, stop: int
) -> None:
    whole = seen(build(world), 2)
    loader = build(world, num_workers=num_workers)
    assert seen(loader, 2, stop) + seen(loader, 2) == whole


@pytest.mark.parametrize("stop", [1, 6, 8])
def test_a_resumed_loader_ends_as_an_uninterrupted_one(world: shoal.World, stop: int) -> None:
    whole = seen(build(world), 2)
    first, second = build(world), build(world)
    begun = seen(first, 2, stop)
    second.load_state_dict(first.state_dict())
    assert begun + seen(second, 2) == whole


def test_a_resumed_loader_may_cut_other_batches(world: shoal.World) -> None:
    first = build(world)
    begun = seen(first, 2, 3)
    second = shoal.Loader(TENSORS, world, batch_size=7, seed=3)
    second.load_state_dict(first.state_dict())
    indices = [index for _, batch in begun + seen(second, 2) for index in batch]
    assert indices == [index for _, batch in seen(build(world), 2) for index in batch]


def test_epochs_are_counted_from_the_start_of_training(world: shoal.World) -> None:
    loader = build(world)
    separate = seen(loader, 1)
    assert (loader.epoch, loader.position) == (1, SIZE)
    assert seen(loader, 1) == []
    separate += seen(loader, 2)
    assert separate == seen(build(world), 2)


def test_sizes(world: shoal.World) -> None:
    loader = build(world)
    assert (len(loader), loader.batch_size, loader.epoch_size) == (6, 4, SIZE)
    dropping = build(world, drop_last=True)
    assert (len(dropping), dropping.epoch_size) == (5, 20)
    assert [len(indices) for _, indices in seen(dropping, 2)] == [4] * 10


def test_a_batch_says_where_it_is(world: shoal.World) -> None:
    loader = build(world, micro_batches=3)
    batches = list(loader.epochs(1))
    assert [(batch.first, batch.size, len(batch)) for batch in batches[-2:]] == [(16, 4, 3), (20, 3, 3)]
    cuts = [(micro.first, micro.samples, micro.weight) for micro in batches[0].micros]
    assert cuts == [(0, 1, 1), (1, 1, 1), (2, 2, 1)]
    assert batches[-1].share == (20, 23)
    assert loader.batch is batches[-1]
    assert all(batch.seed == 3 and batch.wait >= 0 for batch in batches)


def processes(loader: shoal.Loader, epochs: int) -> set[int]:
    return {int(pid) for batch in loader.epochs(epochs) for micro in batch for pid in micro[1]}


def test_workers_live_through_all_epochs_of_a_loop(world: shoal.World) -> None:
    assert len(processes(build(world, Rows(), num_workers=2), 5)) == 2


def draws(loader: shoal.Loader, epochs: int) -> list[float]:
    return [float(u) for batch in loader.epochs(epochs) for micro in batch for u in micro[2]]


def test_random_numbers_of_workers_repeat_in_no_later_loop(world: shoal.World) -> None:
    loader = build(world, Rows(), num_workers=2)
    first, second = draws(loader, 1), draws(loader, 2)
    assert len({*first, *second}) == 2 * SIZE
    assert draws(build(world, Rows(), num_workers=2), 1) == first


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stop", [2, None])
def test_no_worker_and_no_thread_is_left(world: shoal.World, stop: int | None) -> None:
    threads = set(threading.enumerate())
    loader = build(world, Rows(), num_workers=2)
    seen(loader, 2, stop)
    wait_until(lambda: not multiprocessing.active_children())
    wait_until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.full
def test_an_error_in_a_worker_is_the_datasets_own(world: shoal.World) -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise LookupError(f"sample {index} is unreadable")

    with pytest.raises(LookupError, match="is unreadable"):
        seen(build(world, Broken(), num_workers=1), 1)


def test_a_sample_that_fails_leaves_time_to_the_script(world: shoal.World) -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise LookupError

    before = world.timeline.enter(OTHER)
    with pytest.raises(LookupError):
        seen(build(world, Broken()), 1)
    assert world.timeline.enter(before) == OTHER


def halved(samples: list[Any]) -> Tensor:
    return torch.tensor([float(sample[0]) / 2 for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_collate_function_is_the_users(world: shoal.World, num_workers: int) -> None:
    loader = build(world, Rows(), collate_fn=halved, num_workers=num_workers)
    found = torch.cat([micro for batch in loader.epochs(1) for micro in batch])
    assert torch.equal(found.sort().values, torch.arange(SIZE) / 2)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"dataset": torch.arange(SIZE - 1)}, "a dataset of 23 samples"),
        ({"seed": 4}, "seed 3"),
        ({"shuffle": False}, "shuffle=True"),
        ({"drop_last": True}, "epochs of 23 samples"),
    ],
)
def test_a_state_of_other_data_is_refused(
    world: shoal.World, other: dict[str, Any], found: str
) -> None:
    options: dict[str, Any] = {"dataset": torch.arange(SIZE), "batch_size": BATCH, "seed": 3}
    loader = shoal.Loader(world=world, **(options | other))
    with pytest.raises(DataError, match=f"written with {found}"):
        loader.load_state_dict(build(world, torch.arange(SIZE)).state_dict())
    assert loader.position == 0


@pytest.mark.parametrize(
    ("batch_size", "micro_batches", "ranks", "found"),
    [
        (0, 1, 1, "positive integers"),
        (-4, 1, 1, "positive integers"),
        (4.0, 1, 1, "positive integers"),
        (4, 0, 1, "positive integers"),
        (3, 1, 4, "4 x 1 micro-batches: 1 of them"),
        (7, 4, 2, "2 x 4 micro-batches: 1 of them"),
    ],
)
def test_batches_that_cannot_be_cut(
    batch_size: Any, micro_batches: int, ranks: int, found: str
) -> None:
    with pytest.raises(DataError, match=found):
        check_sizes(batch_size, micro_batches, ranks)


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


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_knows_whether_it_ends_an_epoch(world: shoal.World, drop_last: bool) -> None:
    data = shoal.Loader(torch.arange(10), world, batch_size=4, drop_last=drop_last)
    ends = [batch.ends_epoch for batch in data.epochs(2)]
    assert ends == ([False, True] if drop_last else [False, False, True]) * 2


class Slow(Rows):
    """Each sample takes 2 ms at least."""

    def __getitem__(self, index: int) -> tuple[int, int, Tensor]:
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
