"""Bits flipped in the memory of a run: which guard finds them, and that it raises no false alarm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import events_of, squared_error

pytestmark = pytest.mark.processes

EVERY = shoal.Guards(budget=1.0)
"""Checks whose cost allows about every second step."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


class Model(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(16, 2)
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.inner(self.norm(x + self.table))))
        return out


def flip(tensor: Tensor) -> None:
    """Flip a bit of this rank's part of a tensor, unseen by PyTorch."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    memory = local.detach().numpy().reshape(-1).view(np.uint8)
    memory[1] ^= 16


def victim(step: shoal.Step, where: str) -> Tensor:
    parameter = next(p for n, p in step.model.named_parameters() if n.endswith("inner.weight"))
    if where == "parameter":
        return parameter
    if where == "buffer":
        return step.model.get_buffer("table")
    found: Tensor = step.optimizer.state[parameter]["exp_avg"]
    return found


Change = Callable[[shoal.Step, int], None]


def train(
    world: shoal.World,
    directory: str,
    strategy: Any = None,
    change: Change | None = None,
    steps: int = 12,
    guards: shoal.Guards = EVERY,
) -> str:
    """Train a model in which `change` may flip bits after each step; return the error."""
    torch.manual_seed(0)
    data = (torch.randn(32, 8), torch.randn(32, 2))
    model = shoal.parallelize(Model(), world, strategy)
    step = shoal.Step(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), shoal.Task(squared_error), clip=1.0
    )
    loader = shoal.Loader(data, world, batch_size=8, micro_batches=2)
    with shoal.Run(directory, step, loader, trackers=(), guards=guards) as run:
        for batch in loader.epochs(steps):
            try:
                step(batch)
                run.tick()
            except shoal.CorruptionError as error:
                return str(error)
            if step.number == steps:
                break
            if change is not None:
                change(step, world.rank)
    return ""


class Flip:
    """Flips a bit on one rank, once, after a step."""

    def __init__(self, where: str, rank: int, at: int = 2) -> None:
        self.where, self.rank, self.at = where, rank, at

    def __call__(self, step: shoal.Step, rank: int) -> None:
        if rank == self.rank and step.number == self.at:
            flip(victim(step, self.where))


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        *((None, where) for where in ("parameter", "optimizer state", "buffer")),
        *((shoal.FSDP(), where) for where in ("parameter", "optimizer state")),
    ],
)
def test_continuity_finds_a_flipped_bit(
    world: shoal.World, tmp_path: Path, strategy: Any, where: str
) -> None:
    error = train(world, str(tmp_path), strategy, Flip(where, 0))
    assert "no operation of PyTorch changed it" in error
    (event,) = events_of(tmp_path, "corruption")
    assert event["guard"] == "continuity"
    assert event["step"] == 2
    assert ("table" if where == "buffer" else "inner.weight") in event["tensors"][0]


def test_changes_by_operations_are_no_corruption(world: shoal.World, tmp_path: Path) -> None:
    def change(step: shoal.Step, rank: int) -> None:
        with torch.no_grad():
            for parameter in step.model.parameters():
                parameter.mul_(0.99)
            step.model.get_buffer("table").add_(1.0)
        step.optimizer.load_state_dict(step.optimizer.state_dict())

    assert train(world, str(tmp_path), change=change) == ""
    (event,) = events_of(tmp_path, "guards")
    assert event["checks"] >= 2


def test_a_custom_loop_is_guarded(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(Model(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = shoal.Loader((torch.randn(32, 8), torch.randn(32, 2)), world, batch_size=8)

    def loop(run: shoal.Run) -> None:
        for batch in loader.epochs(1):
            for x, y in batch:
                batch.backward(total=F.mse_loss(model(x), y, reduction="sum"), count=len(y))
            batch.finish(model)
            optimizer.step()
            optimizer.zero_grad()
            run.tick()
            flip(model.get_parameter("inner.weight"))

    with (
        shoal.Run(tmp_path, model, loader, optimizer=optimizer, trackers=(), guards=EVERY) as run,
        pytest.raises(shoal.CorruptionError, match=r"inner\.weight"),
    ):
        loop(run)


def test_checks_are_rare_on_a_small_budget(world: shoal.World, tmp_path: Path) -> None:
    assert train(world, str(tmp_path), steps=40, guards=shoal.Guards(budget=1e-6)) == ""
    (event,) = events_of(tmp_path, "guards")
    assert event["checks"] == 1


def drift(step: shoal.Step, rank: int) -> None:
    """Change a parameter in one rank only, as code does that depends on the rank."""
    if rank == 1 and step.number == 1:
        with torch.no_grad():
            step.model.get_parameter("head.bias").add_(1e-3)


def test_replicas_name_the_rank_that_drifts(three: Ranks, tmp_path: Path) -> None:
    errors = three.call(train, str(tmp_path), None, drift)
    assert len(set(errors)) == 1
    assert "rank 1 differs from the majority in" in errors[0]
    (event,) = events_of(tmp_path, "corruption")
    assert event["guard"] == "replicas"
    assert event["ranks"] == [1]
    assert "head.bias" in " ".join(event["tensors"])


@pytest.mark.parametrize("steps", [30, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "layout",
    [
        "replicate=2",
        "shard=2",
        pytest.param("tensor=2", marks=pytest.mark.full),
        pytest.param("pipeline=2", marks=pytest.mark.full),
    ],
)
def test_no_false_alarm(two: Ranks, tmp_path: Path, layout: str, steps: int) -> None:
    strategies = {
        "replicate=2": shoal.DDP(),
        "shard=2": shoal.FSDP(),
        "tensor=2": shoal.TensorParallel(plan={"inner": "column", "head": "row"}),
        "pipeline=2": shoal.Pipeline(split_points=("head",)),
    }
    two.divide(layout)
    assert two.call(train, str(tmp_path), strategies[layout], None, steps) == ["", ""]
    (event,) = events_of(tmp_path, "guards")
    assert event["checks"] >= 2


def test_strategies_with_independent_steps_take_no_guards(two: Ranks, tmp_path: Path) -> None:
    two.divide("replicate=2")
    results = two.attempt(train, str(tmp_path), shoal.LocalSGD())
    assert all("separately" in str(result) for result in results)


@pytest.mark.long
def test_the_benchmark_finds_flips_that_change_the_result(repository: Path) -> None:
    command = [sys.executable, "benchmarks/guards.py", "--json", "--strategies=bits", "--flips=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if line.startswith("|"))
    found = json.loads(done.stdout.splitlines()[-1])["guards"]["bits"]
    rows = {row["kind"]: row for row in found}
    for kind in ("parameter", "optimizer state"):
        assert rows[kind]["continuity"] == [1, 1]
    missed = {kind: row["missed"] for kind, row in rows.items() if kind != "running statistics"}
    assert missed == dict.fromkeys(missed, 0)
    assert len(missed) == 6
