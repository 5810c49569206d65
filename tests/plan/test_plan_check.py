from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import plan_error, shoal
from helpers.synthetic_runs import simulate, write
from shoal.tools.plan.check import check_run
from shoal.tools.plan.machine.machines import RANGES, find_machine
from shoal.tools.plan.time.known_step import machine_of_step, parse_known_step
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.transformer import parse_model
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
    assert parts["data loading"].predicted is None
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
    experts = write(tmp_path / "experts", simulate(2, 40), start={"layout": "expert=2"})
    with pytest.raises(ShoalError, match="have the experts"):
        check_run(experts, model, CPU)
    deep = write(tmp_path / "deep", simulate(8, 40), start={"layout": "pipeline=8"})
    with pytest.raises(ShoalError, match="8 stages for 4 layers"):
        check_run(deep, model, CPU)
    with pytest.raises(ShoalError, match="zbv has 2 stages per rank, not 4"):
        check_run(deep, model, CPU, schedule="zbv", stages=4)
    with pytest.raises(ShoalError):
        check_run(tmp_path / "absent", model, CPU)


FILE = """# our cluster
[mine]
half = 1.0
fp32 = 40.0
memory = 64
memory_bandwidth = 200  # measured
link = 40
network = 1.25
devices = 4
source = "a test"

[mine.efficiency]
product = 0.8   # large products
spread = 0.02
"""


def checked(run: Path, file: Path, *options: str) -> tuple[str, ...]:
    return ("plan", "--model", MODEL, "--machine", str(file), "--check", str(run), *options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", simulate(4, 60, noise=0.0, network=3e-3))


def test_the_next_prediction_is_closer(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    ratios = []
    for _ in range(4):
        found = check_run(run, parse_model(MODEL), find_machine(str(file)))
        ratios.append(found.measured / found.step.total)
        done = shoal(*checked(run, file, "--update"))
        assert done.exit_code == 0, done.exception
    errors = [abs(ratio - 1) for ratio in ratios]
    assert errors == sorted(errors, reverse=True)
    text = file.read_text()
    for line in FILE.splitlines():
        assert line.startswith("product") or line in text
    assert "# large products" in text
    assert text.count(f"run {run}; before: ") == 4
    assert list(tmp_path.glob("*.toml")) == [file]
    efficiency = find_machine(str(file)).efficiency
    assert all(low <= getattr(efficiency, name) <= high for name, (low, high) in RANGES.items())


def test_a_table_of_efficiencies_is_added(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE[: FILE.index("[mine.efficiency]")])
    machine, model = find_machine(str(file)), parse_model(MODEL)
    found = check_run(run, model, machine)
    assert shoal(*checked(run, file, "--update")).exit_code == 0
    # The same step as --known-step-time gives the same machine.
    plan, seconds = parse_known_step(found.known_step, model, machine)
    assert plan == found.plan
    fitted = vars(machine_of_step(model, plan, machine, seconds).efficiency)
    written = vars(find_machine(str(file)).efficiency)
    assert written == pytest.approx(fitted, rel=1e-2)
    assert written != vars(machine.efficiency)


def test_the_file_stays_if_it_is_refused(tmp_path: Path) -> None:
    for text, steps, found in (
        (FILE, 15, "fewer than 16"),
        (FILE.replace("fp32 = 40.0", "fp32 = 1e-4"), 60, "no plausible efficiency"),
        (FILE.replace("[mine.efficiency]\nproduct", "efficiency.product"), 60, "not lines"),
    ):
        run = write(tmp_path / "run", simulate(4, steps, noise=0.0, network=3e-3))
        file = tmp_path / "mine.toml"
        file.write_text(text.replace("spread", "efficiency.spread") if "not lines" in found else text)
        before = file.read_text()
        error = plan_error(*checked(run, file, "--update"))
        assert found in error.found, text
        assert file.read_text() == before, text


def test_update_needs_a_run_and_a_file(run: Path) -> None:
    for options in (("--machine", "cpu"), ()):
        check = ("--check", str(run)) if options else ()
        error = plan_error("plan", "--model", MODEL, *options, *check, "--update")
        assert "--check RUN --machine" in error.fix, options
