"""Models exported from several ranks: by all of them, by rank 0 alone, and where that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import step_of
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes


def exported(world: shoal.World, directory: Path, alone: bool, suffix: str) -> list[bool]:
    """After each step, whether the file holds the weights of that step as this rank has them."""
    torch.manual_seed(0)
    step = step_of(world, nn.Linear(4, 1))
    model = step.model
    path = directory / f"model{suffix}"
    found = []
    for number, batch in enumerate(shoal.Loader((torch.ones(16, 4),), world, batch_size=4).epochs(1)):
        step(batch)
        if world.is_rank_zero or not alone or number == 3:  # the last one is called on all ranks
            shoal.export(model, path, example=(torch.ones(2, 4),) if suffix == ".pt2" else None)
            if suffix == ".pt2":
                weight = torch.export.load(path).state_dict["weight"]
            else:
                weight = torch.load(path, weights_only=True)["weight"]
            found.append(torch.equal(weight, model.get_parameter("weight")))
    return found


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_replicated_model_is_exported_by_all_or_by_rank_0_alone(
    alone: bool, suffix: str, two: Ranks, tmp_path: Path
) -> None:
    first, second = two.call(exported, tmp_path, alone, suffix)
    assert first == [True] * 4
    assert second == [True] * (1 if alone else 4)


def failed(world: shoal.World, path: Path) -> tuple[str, str]:
    model = shoal.parallelize(nn.Linear(4, 1), world)
    with pytest.raises(CheckpointError) as refused:
        shoal.export(model, path)
    world.barrier()
    return refused.value.given, refused.value.found


def test_a_file_that_can_not_be_written_is_an_error_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, found in two.call(failed, tmp_path / "file/model.pt"):
        assert "model.pt" in given
        assert "file" in found


def late(world: shoal.World, path: Path) -> str:
    model = shoal.parallelize(nn.Linear(4, 1), world)
    if world.is_rank_zero:
        world.barrier()
        return ""
    watchdog = world.watchdog
    limits, watchdog.limits = watchdog.limits, replace(watchdog.limits, prepare=0.2)
    try:
        with pytest.raises(CheckpointError) as refused:
            shoal.export(model, path)
    finally:
        watchdog.limits = limits
    world.barrier()
    return refused.value.found


def test_a_rank_that_waits_for_rank_0_in_vain_says_so(two: Ranks, tmp_path: Path) -> None:
    _, found = two.call(late, tmp_path / "model.pt")
    assert "rank 0 has not entered it within 0.2 s" in found
