"""Checkpoints of Shoal read by torch's own torch.distributed.checkpoint, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shoal
from helpers.checkpoint_files import Alone, flip, truncate
from helpers.ranks import Ranks
from shoal.checkpoint import Checkpoints, DCPReader

# 5 rows over 2 ranks: 3 + 2. 1 row: one rank has nothing.
TENSORS = {
    "matrix": torch.arange(35.0).reshape(5, 7),
    "single": torch.arange(4).reshape(1, 4),
    "complex": torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(3, 2),
    "half": torch.arange(5).bfloat16(),
    "number": torch.tensor(7, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "a/b#c~d": torch.tensor([True, False]),
}


def state() -> dict[str, Any]:
    return {"model": TENSORS, "list": [torch.ones(2), {"in": torch.zeros(3)}], "plain": 3}


def to_fill() -> dict[str, Any]:
    """The tensors of `state`, with other values."""
    model = {name: torch.full_like(tensor, 1) for name, tensor in TENSORS.items()}
    return {"model": model, "list": [torch.empty(2), {"in": torch.empty(3)}]}


def assert_filled(found: dict[str, Any]) -> None:
    for name, tensor in TENSORS.items():
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["list"][0], torch.ones(2))
    assert torch.equal(found["list"][1]["in"], torch.zeros(3))


def saved(directory: Path) -> Path:
    Checkpoints(directory, Alone()).save(1, state(), {"random": torch.ones(2)}, {})
    return directory / "step-1"


def load(found: dict[str, Any], path: Path | str) -> None:
    load_dcp(found, storage_reader=DCPReader(path))


def sharded(world: shoal.World, tensors: dict[str, Tensor]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    return {name: distribute_tensor(tensors[name], mesh, [Shard(0)]) for name in ("matrix", "single")}


def save_shards(world: shoal.World, directory: Path) -> None:
    Checkpoints(directory, world).save(1, state() | {"shards": sharded(world, TENSORS)}, {}, {})


def load_shards(world: shoal.World, path: Path) -> None:
    filled = to_fill()
    filled["shards"] = sharded(world, filled["model"])
    load(filled, path)
    assert_filled(filled)
    for name, tensor in filled["shards"].items():
        assert torch.equal(tensor.full_tensor(), TENSORS[name]), name


def test_one_rank_reads_all_tensors_also_by_names_with_dots(tmp_path: Path) -> None:
    found = to_fill() | {"rank": {"0": {"random": torch.empty(2)}}}
    load(found, saved(tmp_path))
    assert_filled(found)
    assert torch.equal(found["rank"]["0"]["random"], torch.ones(2))
    dotted = {"model.matrix": torch.empty(5, 7)}
    load(dotted, tmp_path / "step-1")
    assert torch.equal(dotted["model.matrix"], TENSORS["matrix"])


@pytest.mark.processes
def test_shards_are_read_at_another_size(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    for writers, readers in ((1, 2), (2, 1), (2, 2), (3, 2)):
        directory = tmp_path / f"{writers} to {readers}"
        ranks_of(writers).call(save_shards, directory)
        ranks_of(readers).call(load_shards, directory / "step-1")


def test_the_model_of_a_run(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(torch.nn.Linear(3, 2), world)
    loader = shoal.Loader((torch.ones(4, 3),), world, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters())
    with shoal.Run(tmp_path, model, loader, optimizer=optimizer, trackers=()) as run:
        path = run.save()
    other = torch.nn.Linear(3, 2)
    found = other.state_dict()
    load({"steps": {"step": {"model": found}}}, str(path))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("rank-0.safetensors", flip, r"rank-0.safetensors is altered \(its SHA-256 differs\)"),
        ("rank-0.safetensors", truncate, r"rank-0.safetensors has [\d,]+ bytes, should have"),
        ("manifest.json", truncate, "manifest.json is altered"),
        ("state.json", Path.unlink, "state.json is missing"),
    ],
)
def test_nothing_is_read_from_a_damaged_checkpoint(
    file: str, damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    damage(path / file)
    found = to_fill()
    with pytest.raises(CheckpointException, match=said) as caught:
        load(found, path)
    assert f"given: the checkpoint {path}" in str(caught.value)
    assert torch.equal(found["model"]["matrix"], torch.ones(5, 7))


def test_what_there_is_not_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for name in ("", "step-2", "step-1/state.json"):
        with pytest.raises(CheckpointException, match="it is not the directory of a check") as caught:
            load(to_fill(), tmp_path / name)
        assert "shoal checkpoint ls" in str(caught.value)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.more"):
        load({"model": {"more": torch.empty(1)}}, path)
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for model\.matrix"):
        load({"model": {"matrix": torch.empty(7, 5)}}, path)


def test_names_that_dcp_takes_for_one(tmp_path: Path) -> None:
    both = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    Checkpoints(tmp_path, Alone()).save(1, both, {}, {})
    with pytest.raises(
        CheckpointException, match=r"DCP has the same name, .*, for state/a\.b and state/a/b"
    ):
        load({"a": {"b": torch.empty(1)}}, tmp_path / "step-1")


def load_where_one_rank_sees_damage(world: shoal.World, path: Path) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(to_fill(), path if world.rank == 0 else path / "elsewhere")
    return str(caught.value)


@pytest.mark.processes
def test_an_error_of_one_rank_is_raised_on_all(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for said in ranks_of(2).call(load_where_one_rank_sees_damage, saved(tmp_path)):
        assert "ranks:dict_keys([1])" in said
        assert "it is not the directory of a checkpoint" in said
