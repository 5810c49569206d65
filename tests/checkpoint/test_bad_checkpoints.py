"""Restoring what does not fit, or is damaged: it is said, and nothing is lost or half changed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.checkpoint_files import flip, truncate
from shoal.checkpoint import Checkpoints
from shoal.util.errors import CheckpointError, DataError, ShoalError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
NOBODY = 65534


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def build(
    directory: Path,
    *,
    model: Callable[[], nn.Module] = small,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    part: int = 0,
    samples: int = 40,
    schedule: bool = False,
    names: tuple[str, ...] = ("step",),
    precision: str = "fp32",
    **options: Any,
) -> shoal.Run:
    """A run in a world of one that differs from the one that saved by what is given."""
    world = shoal.init(seed=options.pop("seed", 0))
    net = shoal.parallelize(model(), world)
    chosen = optimizer(list(net.parameters())[part:])
    steps = torch.optim.lr_scheduler.StepLR(chosen, 2) if schedule else None
    step = shoal.Step(
        net,
        chosen,
        shoal.Task(loss),
        schedule=steps,
        schedule_interval="step",
        precision=precision,
    )
    data = shoal.Loader((X[:samples], Y[:samples]), world, batch_size=8, **options)
    return shoal.Run(directory, dict.fromkeys(names, step), data)


def train(run: shoal.Run, steps: int) -> None:
    for batch, _ in zip(run.loader.epochs(9), range(steps), strict=False):
        next(iter(run.steps.values()))(batch)
        run.tick(every=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoints of steps 1, 2 and 3."""
    directory = tmp_path_factory.mktemp("run")
    with build(directory) as run:
        train(run, 3)
    return directory


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def named() -> nn.Module:
    return nn.Sequential(OrderedDict(head=nn.Linear(4, 3)))


FRESH = re.escape("shoal.Run('runs/b', …)")


@pytest.mark.parametrize(
    ("options", "kind", "given", "found", "fix"),
    [
        ({"samples": 39}, DataError, "dataset of 39 samples", "dataset of 40 samples.*repeated", FRESH),
        ({"seed": 1}, DataError, "seed 1", "seed 0", FRESH),
        ({"shuffle": False}, DataError, "shuffle=False", "shuffle=True", FRESH),
        (
            {"model": named},
            CheckpointError,
            "Sequential with 2 tensors",
            "missing: head.weight, head.bias; unexpected: 0.weight, 0.bias, 2.weight and 1 more",
            FRESH,
        ),
        (
            {"model": wider},
            CheckpointError,
            "Sequential with 4 tensors",
            r"other shapes: 0.weight: \(4, 4\) instead of \(5, 4\), 0.bias",
            FRESH,
        ),
        (
            {"optimizer": torch.optim.SGD},
            CheckpointError,
            "SGD",
            "the state of AdamW",
            "use AdamW",
        ),
        (
            {"part": 2},
            CheckpointError,
            "AdamW over 2 parameters",
            "has 4 parameters; missing in it: none; unexpected: 0.weight, 0.bias",
            FRESH,
        ),
        ({"schedule": True}, CheckpointError, "with a schedule", "without one", "schedule="),
        ({"precision": "fp16"}, CheckpointError, "with a scale", "without one", "precision="),
        ({"names": ("a", "b")}, CheckpointError, r"\['a', 'b'\]", r"\['step'\]", "same names"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_that_does_not_fit(
    saved: Path, options: Any, kind: type[ShoalError], given: str, found: str, fix: str
) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("step-*/*")}
    with build(saved, **options) as run:
        [step, *_] = run.steps.values()
        values = {name: value.clone() for name, value in step.model.state_dict().items()}
        with pytest.raises(kind) as caught:
            run.restore()
        error = caught.value
        assert type(error) is kind
        for name, wanted in (("given", given), ("found", found), ("fix", fix)):
            assert re.search(wanted, getattr(error, name)), f"{name}: {getattr(error, name)}"
        # Refused as a whole: neither the model nor the position nor the optimizer has changed.
        assert all(torch.equal(v, values[n]) for n, v in step.model.state_dict().items())
        assert (step.number, run.loader.position) == (0, 0)
        assert step.optimizer.state_dict()["state"] == {}
    assert {path: path.read_bytes() for path in saved.rglob("step-*/*")} == before


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", truncate, "manifest.json is altered"),
        ("state.json", truncate, "state.json has [0-9,]+ bytes, should have"),
        ("rank-0.safetensors", flip, "rank-0.safetensors is altered"),
    ],
)
def test_the_one_before_a_damaged_checkpoint_is_used_and_it_is_said(
    saved: Path,
    tmp_path: Path,
    file: str,
    harm: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = shutil.copytree(saved, tmp_path / "run")
    checkpoints = directory / "checkpoints"
    harm(checkpoints / "step-3" / file)
    with build(directory) as run:
        restored = run.restore()
    assert restored is not None
    assert (restored.step, restored.position) == (2, 16)
    skipped, resumed = capsys.readouterr().out.splitlines()[-2:]
    assert re.search(rf"^skipped {checkpoints}/step-3: {said}", skipped), skipped
    assert resumed == f"resumed at sample 16 (step 2, epoch 0) from {checkpoints}/step-2"


@pytest.mark.parametrize(
    ("blocked", "wanted"),
    [("", "run"), ("", "run/below"), ("checkpoints", "run"), ("events", "run")],
)
def test_a_file_in_the_place_of_a_directory(tmp_path: Path, blocked: str, wanted: str) -> None:
    path = tmp_path / "run" / blocked
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path / wanted)
    assert str(tmp_path / wanted) in caught.value.given
    assert re.search("Not a directory|File exists", caught.value.found)
    assert str(path) in caught.value.found
    assert "ls -ld" in caught.value.fix
    assert path.is_file()


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Nothing holds root back from writing; for a while this process is somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        with ordinary_user(), pytest.raises(CheckpointError) as caught:
            build(Path(name) / "run")
        assert caught.value.given == f"{name}/run/checkpoints for checkpoints"
        assert "Permission denied" in caught.value.found
        assert "ls -ld" in caught.value.fix
        assert list(Path(name).iterdir()) == []


def test_wrong_arguments_of_a_run(tmp_path: Path) -> None:
    with build(tmp_path) as run:
        [step] = run.steps.values()
        for name in (1, "a\nb", "\udc80"):
            with pytest.raises(shoal.StepError, match="is not a printable str"):
                shoal.Run(tmp_path, {name: step}, run.loader)  # type: ignore[dict-item]
        for wrong in ({}, step.model, {"step": loss}):
            with pytest.raises(
                shoal.StepError, match=r"neither a Step nor a model|without optim"
            ) as told:
                shoal.Run(tmp_path, wrong, run.loader)  # type: ignore[arg-type]
            assert "shoal.Step(model, optimizer, task)" in told.value.fix
        with pytest.raises(CheckpointError, match="keep=0") as caught:
            shoal.Run(tmp_path, step, run.loader, keep=0)
        assert "keep=1" in caught.value.fix
        for every in (0, -1):
            with pytest.raises(CheckpointError) as caught:
                run.tick(every=every)
            assert caught.value.given == f"run.tick(every={every})"
            assert "run.tick(every=500)" in caught.value.fix


def test_a_checkpoint_that_no_run_has_saved(tmp_path: Path) -> None:
    with build(tmp_path) as run:
        checkpoints = Checkpoints(tmp_path / "checkpoints", run.world)
        states: list[dict[str, Any]] = [{"weight": 1}, {"steps": {}, "state": {}}]
        for state in (*states, {"steps": {"step": {}}, "state": {}, "loader": {}}):
            checkpoints.save(1, state, {}, {})
            with pytest.raises(CheckpointError, match="that no Run has saved"):
                run.restore()
