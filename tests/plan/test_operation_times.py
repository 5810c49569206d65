"""Efficiencies from the operations of a model's own passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.cli import plan_error
from helpers.cli import shoal as command
from helpers.clocks import ManualClock
from helpers.planned_models import Transformer, values, words
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import RANGES, find_machine
from shoal.tools.plan.machine.operation_times import OperationTimes, fit_operations, time_operations
from shoal.tools.plan.time.rates import compute_seconds
from shoal.tools.plan.work.planned_step import PlannedStep, Work
from shoal.tools.plan.work.traced_work import TracedWork
from shoal.util.errors import ShoalError

PLAN = PlannedStep(
    layout=shoal.Layout.parse("replicate=1").resolve(1),
    global_batch=4,
    micro_batch=4,
    precision="fp32",
)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.plan.machine.operation_times._SECONDS", 0.0)
    monkeypatch.setattr("shoal.tools.plan.machine.measure._SECONDS", 0.0)


def transformer() -> Workload:
    rows = torch.randint(0, 100, (8, 17))
    return Workload(lambda: Transformer(48, 2, 100), shoal.Task(words), (rows[:, :-1], rows[:, 1:]))


def test_measured_seconds_give_back_the_efficiencies() -> None:
    machine = replace(find_machine("cpu"), cores=2)
    wanted = {"product": 0.8, "attention": 0.2, "convolution": 1.3, "memory": 0.9}
    true = replace(machine, efficiency=replace(machine.efficiency, **wanted))
    works = {
        "product": Work(products=4e9, product_bytes=2e7),
        "attention": Work(attention=1e9, traffic=1e7),
        "convolution": Work(convolutions=3e9, product_bytes=1e7),
        "memory": Work(traffic=4e8),
    }
    kinds = {name: (work, compute_seconds(work, PLAN, true).total) for name, work in works.items()}
    fitted = fit_operations(machine, kinds).efficiency
    for name, value in wanted.items():
        assert getattr(fitted, name) == pytest.approx(value)


def test_only_efficiencies_of_measured_kinds_change_and_stay_in_range() -> None:
    machine = find_machine("a100-80")
    fitted = fit_operations(machine, {"memory": (Work(traffic=1.0), 1.0)})
    assert fitted == replace(
        machine, efficiency=replace(machine.efficiency, memory=RANGES["memory"][0])
    )
    # At the measured bandwidth, the operands alone take longer than the measured seconds.
    fast = fit_operations(machine, {"product": (Work(products=1.0, product_bytes=1e9), 1e-6)})
    assert fast.efficiency.product == RANGES["product"][1]
    assert fit_operations(machine, {}) == machine


def test_all_work_of_the_passes_is_measured(short: None) -> None:
    times = time_operations("transformer", transformer, 8)
    model, rows = Transformer(48, 2, 100), torch.randint(0, 100, (8, 17))
    with TracedWork(lambda: "") as traced:
        total, count = words(model(rows[:, :-1]), (rows[:, :-1], rows[:, 1:]))
        (total / count).backward()
    (segment,) = traced.segments
    kinds = times.kinds()
    assert set(kinds) == {"product", "attention", "memory"}
    assert kinds["product"][0].products == segment.work.products
    assert kinds["attention"][0].attention == segment.work.attention
    assert all(seconds > 0 for _, seconds in kinds.values())


class Readings(ManualClock):
    """A clock with these readings, one after the other."""

    def __init__(self, readings: Iterator[float]) -> None:
        super().__init__()
        self._readings = readings

    def now(self) -> float:
        return next(self._readings)


def test_operations_have_the_seconds_of_the_fastest_pass() -> None:
    clock = iter([0.0, 5.0, 10.0, 13.0, 20.0, 21.0, 100.0, 102.0, 110.0, 117.0, 120.0, 121.0])
    times = OperationTimes(torch.device("cpu"), Readings(clock))
    left, small = torch.ones(64, 64), torch.ones(1)
    for _ in range(2):
        with times:
            left @ left
            left @ left
            small + small
    # The passes take 9 and 10 s. The sum of two numbers takes 1 s, which the products take too.
    assert times.kinds()["product"] == (
        Work(products=4 * 64**3, product_bytes=6 * 4 * 64**2, operations=2),
        6.0,
    )
    assert times.kinds()["memory"][1] == 0.0


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        raise ValueError("the wrong number of channels")


def exits() -> nn.Module:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("model", "samples", "found"),
    [
        (Failing(), 4, "wrong number of channels"),
        (exits, 4, "ends with exit code 3"),
        (nn.Identity(), 4, "no gradient"),
        (nn.Linear(2, 2), 9, "the dataset has 8"),
        (lambda: torch.compile(nn.Linear(2, 2)), 4, "compiled code"),
    ],
)
def test_the_error_of_a_wrong_model_is_reported(
    short: None, model: nn.Module, samples: int, found: str
) -> None:
    def build() -> Workload:
        return Workload(model, shoal.Task(values), (torch.ones(8, 2), torch.ones(8, 2)))

    with pytest.raises(ShoalError, match=found):
        time_operations("train.py:build", build, samples)


def test_a_pass_that_fails_is_not_kept() -> None:
    times = OperationTimes(torch.device("cpu"))
    with pytest.raises(ValueError, match="channels"), times:
        Failing()(torch.ones(2))
    assert times.fastest == []


def test_operations_on_sparse_tensors_are_measured() -> None:
    times = OperationTimes(torch.device("cpu"))
    sparse = torch.eye(8).to_sparse_csr()
    with times:
        sparse @ torch.ones(8, 8)
    assert times.fastest


@pytest.mark.full
def test_the_command_measures_a_model(short: None, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    rates = ("--link", "1", "--network", "1", "-o", str(out))
    done = command("bench", "machine", "--model", "resnet-small:size=8,blocks=1", *rates)
    assert done.exit_code == 0, done.output
    found = find_machine(str(out)).efficiency
    assert found.convolution != find_machine("cpu").efficiency.convolution
    # Its products, of 8 samples, are too small to reach the usual part of the peak.
    assert "Warning: product is at the limit of its range, 0.3." in done.stderr


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--model", "nowhere.py:build"), "no file"),
        (("--micro-batch", "4"), "no --model"),
        (("-o", "nowhere/mine.toml"), "no directory"),
        (("-o", "/"), "it is a directory"),
        (("--model", "resnet-small:size=8,blocks=1"), "can't be measured"),
    ],
)
def test_wrong_options_are_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], found: str
) -> None:
    monkeypatch.setattr(
        "shoal.tools.plan.machine.measure._fastest", lambda *_: pytest.fail("it measured")
    )
    monkeypatch.setattr(
        "shoal.tools.plan.machine.operation_times.init", lambda *_: pytest.fail("it measured")
    )
    rates = () if found == "can't be measured" else ("--link", "1", "--network", "1")
    error = plan_error("bench", "machine", *options, *rates)
    assert found in error.found
