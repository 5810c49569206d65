"""Efficiencies of a machine file that follow a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import plan_error, shoal
from helpers.synthetic_runs import simulate, write
from shoal.plan.check import check_run
from shoal.plan.machines import RANGES, find_machine
from shoal.plan.model import parse_model

MODEL = "hidden=512,layers=4,heads=8,vocab=1000,seq=128"
FILE = """# our cluster
[mine]
half = 1.0
fp32 = 1.0
memory = 64
memory_bandwidth = 50  # measured
link = 10
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
    before = find_machine(str(file)).efficiency
    assert shoal(*checked(run, file, "--update")).exit_code == 0
    assert find_machine(str(file)).efficiency != before


def test_the_file_stays_if_it_is_refused(tmp_path: Path) -> None:
    for text, steps, found in (
        (FILE, 15, "fewer than 16"),
        (FILE.replace("fp32 = 1.0", "fp32 = 1e-6"), 60, "another model"),
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
