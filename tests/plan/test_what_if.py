from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.cli import plan_error, shoal
from shoal.plan.machines import find_machine
from shoal.plan.what_if import changed_machine
from shoal.util.errors import ShoalError

A100 = find_machine("a100-80")
COMMAND = ("plan", "--model", "llama-7b", "--machine", "a100-80", "-n", "16", "--batch", "64", "--json")


def test_a_factor_changes_one_rate() -> None:
    changed = asdict(changed_machine(A100, "network=2x"))
    assert changed == asdict(A100) | {"network": 2 * A100.network}
    assert changed_machine(A100, "network=0.5x").network == A100.network / 2


def test_a_factor_changes_an_efficiency_within_its_range() -> None:
    assert changed_machine(A100, "host=0.5x").efficiency.host == A100.efficiency.host / 2
    with pytest.raises(ShoalError, match="between"):
        changed_machine(A100, "product=3x")


def test_the_answers_are_those_of_a_search_with_this_machine() -> None:
    found = json.loads(shoal(*COMMAND, "--what-if", "machine=h200", "--what-if", "slowest=1.2").stdout)
    other = json.loads(shoal(*(word.replace("a100-80", "h200") for word in COMMAND)).stdout)
    faster, slower = found["what_if"]
    assert (faster["layout"], faster["step_seconds"]) == (
        other["best"][0]["layout"],
        other["best"][0]["step_seconds"],
    )
    assert faster["ratio"] == pytest.approx(faster["step_seconds"] / found["best"][0]["step_seconds"])
    # The collectives do not slow down.
    assert 1.1 < slower["ratio"] < 1.2
    assert slower["part"] == "products"


def test_text_and_page_have_a_row_for_each_question(tmp_path: Path) -> None:
    page = ("--html", str(tmp_path))
    done = shoal(*COMMAND[:-1], "--what-if", "network=2x", "--what-if", "memory=0.1x", *page)
    assert ">network=2x</" in (tmp_path / "index.html").read_text()
    assert "What if" in done.stdout
    assert "network=2x" in done.stdout
    assert "none fits" in done.stdout


def test_questions_that_are_wrong() -> None:
    for question, found, fix in (
        ("netwrok=2x", "a question is one of", "--what-if network="),
        ("network", "with a value", "network=2x"),
        ("network=fast", "not a factor", "network=2x"),
        ("network=0x", "not a factor", "network=2x"),
        ("network=25", "not a factor from 0.001 to 1000, with x", "network=2x"),
        ("half=1e-300x", "not a factor", "network=2x"),
        ("slowest=nan", "not a factor from 1 to 1000", "slowest=1.2"),
        ("slowest=0.5", "not a factor from 1 to 1000", "slowest=1.2"),
        ("batch=32", "a question is one of", "use --what-if network=2x"),
        ("machine=h20", "not in the catalogue", "h200"),
    ):
        with pytest.raises(ShoalError) as caught:
            changed_machine(A100, question)
        assert found in caught.value.found, question
        assert fix in caught.value.fix, question


def test_a_traced_module_has_no_search_for_a_question() -> None:
    error = plan_error("plan", "--model", "train.py:build", "--what-if", "network=2x")
    assert "search for layouts" in error.found
