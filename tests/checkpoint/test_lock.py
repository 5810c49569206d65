"""One live run per directory, whoever dies how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from helpers.ranks import RankError, Ranks
from shoal.checkpoint import Fence, fencing
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

HELD: list[shoal.Run] = []


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def opened(world: shoal.World, directory: Path) -> shoal.Run:
    model = shoal.parallelize(nn.Linear(2, 1), world)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    data = shoal.Loader((torch.ones(8, 2),), world, batch_size=4)
    run = shoal.Run(directory, step, data)
    run.restore()
    return run


def hold(world: shoal.World, directory: Path) -> int:
    """Open a run and leave it open; also to a fork, as a DataLoader's worker is, that lives on."""
    HELD.append(opened(world, directory))
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


@pytest.mark.full
def test_a_second_run_is_refused_until_the_first_is_gone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(hold, tmp_path)
    with shoal.init() as world:
        with pytest.raises(
            CheckpointError, match="another Run is open in this directory: process "
        ) as caught:
            opened(world, tmp_path)
        assert f"process {ranks.processes[0].pid} on" in caught.value.found
        ranks.kill()
        opened(world, tmp_path).close()


def reopened(world: shoal.World, directory: Path) -> None:
    HELD.append(opened(world, directory))
    opened(world, directory)
    for run in HELD:
        run.close()


def test_one_process_may_open_it_again_and_another_after_it_is_closed(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.call(reopened, tmp_path)
    with shoal.init() as world:
        opened(world, tmp_path).close()


@pytest.mark.full
def test_all_ranks_are_told(ranks: Ranks, tmp_path: Path) -> None:
    with shoal.init() as world:
        held = opened(world, tmp_path)
        for result in ranks.attempt(opened, tmp_path):
            assert isinstance(result, RankError)
            assert isinstance(result.error, CheckpointError)
        held.close()


def apart(world: shoal.World, directory: Path) -> None:
    # Of this name, as a node's own /tmp is: the disk of rank 1 is another one.
    fencing.SEEN_SECONDS = 0.2
    if world.rank:
        Fence._taken = lambda self: []  # type: ignore[method-assign]
    opened(world, directory)


def by_the_clock(world: shoal.World, directory: Path) -> None:
    opened(world, directory / f"run-{time.time()}-{world.rank}")


@pytest.mark.parametrize("how", [apart, by_the_clock])
def test_ranks_with_directories_of_their_own_are_refused(
    ranks: Ranks, tmp_path: Path, how: Callable[[shoal.World, Path], None]
) -> None:
    for result in ranks.attempt(how, tmp_path):
        assert isinstance(result, RankError)
        assert isinstance(result.error, CheckpointError)
        assert "rank 1" in result.error.found
        assert "is missing" in result.error.found
