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
from helpers.processes import Alone, OverGloo, run
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


def sharded(world: OverGloo, tensors: dict[str, Tensor]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    return {name: distribute_tensor(tensors[name], mesh, [Shard(0)]) for name in ("matrix", "single")}


def save_shards(world: OverGloo, directory: Path) -> None:
    Checkpoints(directory, world).save(1, state() | {"shards": sharded(world, TENSORS)}, {}, {})


def load_shards(world: OverGloo, path: Path) -> None:
    filled = to_fill()
    filled["shards"] = sharded(world, filled["model"])
    load(filled, path)
    assert_filled(filled)
    for name, tensor in filled["shards"].items():
        assert torch.equal(tensor.full_tensor(), TENSORS[name]), name


def test_one_rank_reads_all_tensors(tmp_path: Path) -> None:
    found = to_fill() | {"rank": {"0": {"random": torch.empty(2)}}}
    load(found, saved(tmp_path))
    assert_filled(found)
    assert torch.equal(found["rank"]["0"]["random"], torch.ones(2))


def test_by_names_with_dots(tmp_path: Path) -> None:
    found = {"model.matrix": torch.empty(5, 7)}
    load(found, saved(tmp_path))
    assert torch.equal(found["model.matrix"], TENSORS["matrix"])


@pytest.mark.processes
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_shards_are_read_at_another_size(writers: int, readers: int, tmp_path: Path) -> None:
    run(writers, save_shards, tmp_path)
    run(readers, load_shards, tmp_path / "step-1")


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


def altered(path: Path) -> None:
    file = path / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def shortened(path: Path) -> None:
    file = path / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def forged(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"{")


def lost(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (altered, r"rank-0.safetensors is altered \(its SHA-256 differs\)"),
        (shortened, r"rank-0.safetensors has [\d,]+ bytes, should have"),
        (forged, "manifest.json is truncated or altered"),
        (lost, "state.json is missing"),
    ],
)
def test_nothing_is_read_from_a_damaged_checkpoint(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    damage(path)
    found = to_fill()
    with pytest.raises(CheckpointException, match=said) as caught:
        load(found, path)
    assert f"given: the checkpoint {path}" in str(caught.value)
    assert torch.equal(found["model"]["matrix"], torch.ones(5, 7))


@pytest.mark.parametrize("name", ["", "step-2", "step-1/state.json"])
def test_a_directory_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointException, match="it is not the directory of a checkpoint") as caught:
        load(to_fill(), tmp_path / name)
    assert "shoal checkpoint ls" in str(caught.value)


def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    path = saved(tmp_path)
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


def load_where_one_rank_sees_damage(world: OverGloo, path: Path) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(to_fill(), path if world.rank == 0 else path / "elsewhere")
    return str(caught.value)


@pytest.mark.processes
def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for said in run(2, load_where_one_rank_sees_damage, saved(tmp_path)):
        assert "ranks:dict_keys([1])" in said
        assert "it is not the directory of a checkpoint" in said
