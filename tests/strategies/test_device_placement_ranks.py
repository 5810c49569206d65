"""Replicas of which each is on several devices: saved and resumed on others, or on one; refusals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers.ranks import RankError, Ranks
from helpers.reference import (
    BATCH,
    LEARNING_RATE,
    SEED,
    TOLERANCE,
    Row,
    Trained,
    build,
    dataset,
    distance,
    specification,
)
from helpers.reference import loss as row_loss
from shoal.strategies.device_placement.transfer_hooks import MoveArguments
from shoal.util.errors import StepError

pytestmark = [pytest.mark.processes, pytest.mark.full]

ROW = Row("transformer", 101, True, 4, False, 0.5)
SAVED, STEPS = 4, 10
TWICE = (0, 0)
"""The rank's device, taken for two: what is tried here is all but the moves themselves."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, seed=SEED) as ranks:
        yield ranks


def trained(world: shoal.World, devices: Any, directory: Path, begin: int, end: int) -> Trained:
    """Steps from `begin` to `end`, resumed from and saved to the directory."""
    strategy = None if devices is None else shoal.DevicePlacement(devices, in_flight=2)
    model = shoal.parallelize(build(ROW), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    task = shoal.Task(lambda output, batch: row_loss(ROW, output, batch[1]))
    step = shoal.Step(model, optimizer, task, clip=ROW.clip)
    data = shoal.Loader(
        dataset(ROW), world, batch_size=BATCH, micro_batches=ROW.micro_batches, seed=SEED
    )
    norms, losses = [], []
    with shoal.Run(directory, step, data, trackers=()) as run:
        run.restore()
        assert step.number == begin
        for batch in itertools.islice(data.epochs(9), end - begin):
            result = step(batch)
            run.tick()
            norms.append(result.norm)
            losses.append(result.loss)
        run.save()
    return Trained({n: p.detach().numpy().copy() for n, p in model.named_parameters()}, norms, losses)


def test_saved_on_two_ranks_and_resumed_alone_on_one_device(two: Ranks, tmp_path: Path) -> None:
    expected = specification(ROW, STEPS)
    before = two.call(trained, TWICE, tmp_path, 0, SAVED)[0]
    with shoal.init(device="cpu", seed=SEED) as world:
        after = trained(world, None, tmp_path, SAVED, STEPS)
    whole = Trained(after.parameters, before.norms + after.norms, before.losses + after.losses)
    assert distance(whole, expected) < TOLERANCE


def test_saved_alone_and_resumed_on_two_ranks_of_two_devices(two: Ranks, tmp_path: Path) -> None:
    expected = specification(ROW, STEPS)
    with shoal.init(device="cpu", seed=SEED) as world:
        before = trained(world, None, tmp_path, 0, SAVED)
    for after in two.call(trained, TWICE, tmp_path, SAVED, STEPS):
        whole = Trained(after.parameters, before.norms + after.norms, before.losses + after.losses)
        assert distance(whole, expected) < TOLERANCE


def hooked(world: shoal.World) -> list[str]:
    model = shoal.parallelize(build(ROW), world, [shoal.DevicePlacement(TWICE), shoal.DDP()])
    return [
        name
        for name, part in model.named_modules()
        if any(isinstance(hook, MoveArguments) for hook in part._forward_pre_hooks.values())
    ]


def test_all_that_holds_parameters_is_hooked(two: Ranks) -> None:
    for names in two.call(hooked):
        assert {"embedding", "block", "block.self_attn", "norm", "head"} <= {*names}


def refused(world: shoal.World, devices: Any) -> None:
    shoal.parallelize(build(ROW), world, shoal.DevicePlacement(devices))


def test_what_is_refused_is_so_on_all_ranks(two: Ranks) -> None:
    for result in two.attempt(refused, {"": 0, "heads": 0}):
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError)
        assert "matches 'heads'" in result.error.found
        assert "'head'" in result.error.fix
