from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import step_of
from shoal.util.errors import CheckpointError


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


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_program_takes_batches_of_any_size(samples: int, world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(Tied(), world)
    path = shoal.export(model, tmp_path / "model.pt2", example=(VALUES,))
    values = torch.randn(samples, 4)
    assert torch.equal(torch.export.load(path).module()(values), copy.deepcopy(model).eval()(values))


class Fixed(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).reshape(2, 1)


@pytest.mark.parametrize("kind", ["code", "one sample", "any size"])
def test_a_program_that_takes_one_size_only_says_so(
    kind: str, world: shoal.World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = shoal.parallelize(Fixed(4, 1) if kind == "code" else nn.Linear(4, 1), world)
    example = (VALUES[:1] if kind == "one sample" else VALUES,)
    shoal.export(model, tmp_path / "model.pt2", example=example)
    said = capfd.readouterr().out
    size = {"code": "2", "one sample": "1"}.get(kind)
    assert (f": {size}; the model's code fixes them" in said) if size else not said


class Counted(nn.Linear):
    """A module with a state besides its tensors."""

    def __init__(self, calls: int = 3) -> None:
        super().__init__(4, 1)
        self.extra: Any = {"calls": calls, "mean": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_pickled_state_keeps_what_is_no_tensor(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = shoal.export(shoal.parallelize(Counted(5), world), tmp_path / f"model{suffix}")
    state = torch.load(path, weights_only=True)
    plain, other = Counted(), Counted()
    plain.load_state_dict(state)
    shoal.load(other, state)
    assert (plain.extra["calls"], other.extra["calls"]) == (5, 5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_a_file_can_not_hold_is_named_and_loaded_from_the_model(
    suffix: str, world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Counted(5)
    model.extra = {"kind": nn.Linear}
    path = shoal.export(shoal.parallelize(model, world), tmp_path / f"model{suffix}")
    assert f"{path} does not hold _extra_state of the state_dict" in capsys.readouterr().out
    other = Counted(7)
    with pytest.warns(UserWarning, match="lacks _extra_state; the model keeps its own values") as said:
        shoal.load(other, torch.load(path) if suffix == ".pt" else path)
    assert said[0].filename == __file__
    assert other.extra["calls"] == 7
    assert torch.equal(other.weight, model.weight)


def test_the_errors_of_load_are_for_who_loads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        shoal.load(nn.Linear(2, 2), {"kernel": torch.zeros(2, 2), "bias": torch.zeros(2)})
    assert "missing: weight; unexpected: kernel" in refused.value.found
    assert "shoal.Run" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_complex_numbers_of_twice_64_bits(suffix: str, world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(nn.Linear(2, 2, dtype=torch.complex128), world)
    path = tmp_path / f"model{suffix}"
    if suffix == ".pt":
        assert torch.equal(torch.load(shoal.export(model, path))["weight"], model.weight)
        return
    with pytest.raises(CheckpointError, match="weight is complex128, for which") as refused:
        shoal.export(model, path)
    assert refused.value.fix == "shoal.export(model, 'model.pt')"
    assert list(tmp_path.iterdir()) == []


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


LOAD: Any = shoal.load  # also for arguments of other types
PLAIN = nn.Linear(2, 2).state_dict()
BOTH = {**PLAIN, **{f"module.{name}": torch.zeros_like(value) for name, value in PLAIN.items()}}


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda path: shoal.load(nn.Linear(2, 2), path / "gone.pt"), "there is no such file"),
        (lambda path: shoal.load(nn.Linear(2, 2), path / "model.pt"), "does not unpickle files"),
        (lambda path: shoal.load(nn.Linear(2, 2), path / "part.safetensors"), "(?i)header"),
        (lambda path: shoal.load(nn.Linear(2, 2), nn.Linear(2, 3).state_dict()), "instead of"),
        (lambda path: shoal.load(nn.Linear(2, 2), {}), "missing: weight, bias"),
        (lambda path: shoal.load(nn.Linear(2, 2), BOTH), "such as module.bias"),
        (lambda path: LOAD(nn.Linear(2, 2), {1: torch.ones(1)}), "this one is 1"),
        (lambda path: LOAD(nn.Linear(2, 2), PLAIN, rename="x"), "rename is a function"),
        (lambda path: LOAD(nn.Linear(2, 2), PLAIN, rename=lambda name: None), "after rename"),
        (lambda path: LOAD(nn.Linear(2, 2), PLAIN, strict="no"), "True or False"),
        (lambda path: shoal.load(nn.Linear(2, 2), {"a": torch.ones(1)}, strict=False), "missing:"),
    ],
)
def test_what_can_not_be_loaded(act: object, found: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"a pickle")
    (tmp_path / "part.safetensors").write_bytes(b"a")
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
    with pytest.raises(
        CheckpointError, match=r"the extensions are \.safetensors, \.pt, \.pth, \.ts, \.pt2"
    ):
        shoal.export(model, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=r"torch\.export traces the model"):
        shoal.export(model, tmp_path / "model.pt2")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        shoal.export(model, tmp_path / "file/model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_rank_that_waits_for_rank_0_in_vain_says_so(two: Ranks, tmp_path: Path) -> None:
    _, found = two.call(late, tmp_path / "model.pt")
    assert "rank 0 has not entered it within 0.2 s" in found
