from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import shoal
from helpers.synthetic_runs import simulate, write
from shoal.plan.check import check_run
from shoal.plan.machines import find_machine
from shoal.plan.model import parse_model
from shoal.plan.step_time import estimate_step
from shoal.util.errors import ShoalError

MODEL = "hidden=512,layers=4,heads=8,vocab=1000,seq=128"
CPU = find_machine("cpu")


def test_parts_of_a_run_are_compared_with_those_of_its_own_layout(tmp_path: Path) -> None:
    run = write(tmp_path, simulate(4, 60, noise=0.0, network=3e-3), start={"precision": "bf16"})
    found = check_run(run, parse_model(MODEL), CPU, micro_batch=8)
    assert str(found.plan.layout) == "replicate=4"
    assert (found.plan.global_batch, found.plan.micro_batches, found.plan.precision) == (64, 2, "mixed")
    parts = {part.name: part for part in found.parts}
    assert parts["forward and backward"].measured == pytest.approx(14e-3, rel=0.01)
    assert parts["optimizer"].measured == pytest.approx(2e-3, rel=0.01)
    assert parts["communication and waiting"].measured == pytest.approx(3e-3, rel=0.05)
    assert parts["data"].predicted is None
    assert found.measured == pytest.approx(19.8e-3, rel=0.01)
    predicted = [part.predicted for part in found.parts if part.predicted is not None]
    step = estimate_step(parse_model(MODEL), found.plan, CPU)
    assert sum(predicted) == pytest.approx(step.total)
    assert f"{found.measured / step.total:.2f} times" in found.verdict


def test_the_command_and_its_page(tmp_path: Path) -> None:
    run = write(tmp_path / "run", simulate(2, 40))
    options = ("--model", MODEL, "--machine", "cpu", "--check", str(run))
    done = shoal("plan", *options, "--html", str(tmp_path / "page"))
    assert done.exit_code == 0, done.output
    for part in ("forward and backward", "not predicted", "times the predicted time"):
        assert part in done.stdout
        assert part in (tmp_path / "page" / "index.html").read_text()
    values = json.loads(shoal("plan", *options, "--json").stdout)
    assert values["layout"] == "replicate=2"
    assert sum(part["measured"] for part in values["parts"]) == values["measured_seconds"]


def test_runs_that_can_not_be_checked(tmp_path: Path) -> None:
    model = parse_model(MODEL)
    run = write(tmp_path / "run", simulate(2, 40))
    with pytest.raises(ShoalError, match="is not divisible by 5"):
        check_run(run, model, CPU, micro_batch=5)
    budget = write(tmp_path / "budget", simulate(2, 40), start={"batch_size": "4096 tokens"})
    with pytest.raises(ShoalError, match="4096 tokens"):
        check_run(budget, model, CPU)
    with pytest.raises(ShoalError):
        check_run(tmp_path / "absent", model, CPU)


def test_a_page_of_a_search(tmp_path: Path) -> None:
    done = shoal(
        *("plan", "--model", "llama-7b", "-n", "8", "--batch", "64", "--top", "2"),
        *("--html", str(tmp_path)),
    )
    assert done.exit_code == 0, done.output
    page = (tmp_path / "index.html").read_text()
    for part in ("is the fastest", "exposed data parallel", "optimizer", "does not fit"):
        assert part in page
    assert (tmp_path / "step.svg").exists()
    assert "products" in (tmp_path / "step.csv").read_text()
