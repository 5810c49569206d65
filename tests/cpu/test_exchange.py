from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.errors import CheckpointError


@pytest.fixture
def world() -> Iterator[shoal.World]:
    with shoal.init() as alone:
        yield alone


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Linear(4, 4, bias=False)
        self.drop = nn.Dropout(0.9)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(3))

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.head(self.drop(self.embed(values)))
        return output


VALUES = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def expected(model: nn.Module) -> Tensor:
    output: Tensor = copy.deepcopy(model).eval()(VALUES)
    return output


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_are_read_without_shoal(suffix: str, world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(Tied(), world)
    path = shoal.export(model, tmp_path / f"folder/model{suffix}")
    assert [file.name for file in path.parent.iterdir()] == [f"model{suffix}"]
    state = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    fresh = Tied()
    nn.init.zeros_(fresh.embed.weight)
    fresh.load_state_dict(state)  # strictly: both names of the tied weight are there
    assert torch.equal(fresh.eval()(VALUES), expected(model))
    assert model.training


@pytest.mark.parametrize(("suffix", "traced"), [(".ts", False), (".ts", True), (".pt2", True)], ids=str)
def test_programs_run_without_the_class(
    suffix: str, traced: bool, world: shoal.World, tmp_path: Path
) -> None:
    model = shoal.parallelize(Tied(), world)
    path = shoal.export(model, tmp_path / f"model{suffix}", example=(VALUES,) if traced else None)
    program: Any = torch.jit.load(path) if suffix == ".ts" else torch.export.load(path).module()
    assert torch.equal(program(VALUES), expected(model))


def test_a_run_and_a_step_give_their_model(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(nn.Linear(4, 1), world)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    with shoal.Run(tmp_path / "run", step, shoal.Loader((VALUES,), world, batch_size=2)) as run:
        sources: list[shoal.Run | shoal.Step] = [run, step]
        for number, source in enumerate(sources):
            found = load_file(shoal.export(source, tmp_path / f"{number}.safetensors"))
            assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_dropped(prefix: str, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    nn.init.ones_(other.embed.weight)
    shoal.load(model, {prefix + name: value for name, value in other.state_dict().items()})
    assert torch.equal(model.head.weight, other.head.weight)


def test_names_of_ones_own_that_look_like_prefixes_stay() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    shoal.load(model, state)
    shoal.load(model, {f"_orig_mod.{name}": value for name, value in state.items()})
    assert float(model.get_parameter("module.bias").sum()) == 2


def test_compiled_parts_lose_their_prefix_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = ("0._orig_mod.weight", "0._orig_mod.bias", "1.weight", "1.bias")
    shoal.load(model, dict(zip(names, (p.detach() + 1 for p in model.parameters()), strict=True)))


PLAIN = nn.Linear(2, 2).state_dict()
BOTH = {**PLAIN, **{f"module.{name}": torch.zeros_like(value) for name, value in PLAIN.items()}}


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda path: shoal.load(nn.Linear(2, 2), path / "model.pt"), "unpickles nothing"),
        (lambda path: shoal.load(nn.Linear(2, 2), path / "gone.safetensors"), "No such file"),
        (lambda path: shoal.load(nn.Linear(2, 2), nn.Linear(2, 3).state_dict()), "instead of"),
        (lambda path: shoal.load(nn.Linear(2, 2), {}), "missing: weight, bias"),
        (lambda path: shoal.load(nn.Linear(2, 2), BOTH), "module.bias for one"),
    ],
)
def test_what_can_not_be_loaded(act: object, found: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=found):
        act(tmp_path)  # type: ignore[operator]


FULL = """
import resource, sys, torch, shoal
from torch import nn
with shoal.init() as world:
    model = shoal.parallelize(nn.Linear(100, 100), world)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    example = (torch.ones(1, 100),) if sys.argv[1].endswith("2") else None
    try:
        shoal.export(model, sys.argv[1], example=example)
    except shoal.CheckpointError as error:
        print(error.found)
"""


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "ts", "pt2"])
def test_a_file_that_does_not_fit_is_an_error_that_says_so(suffix: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FULL, f"model.{suffix}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "File too large" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_exported(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(nn.Linear(2, 2), world)
    with pytest.raises(CheckpointError, match=r"the endings are \.safetensors, \.pt, \.ts, \.pt2"):
        shoal.export(model, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=r"torch\.export traces the model"):
        shoal.export(model, tmp_path / "model.pt2")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        shoal.export(model, tmp_path / "file/model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
