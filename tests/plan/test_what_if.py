from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import plan_error, shoal
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.search.search import changed_machine
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


def test_a_slow_device_multiplies_in_fp8_slowly_too() -> None:
    machine = find_machine("h200")
    slow = changed_machine(machine, "slowest=2")
    assert (slow.half, slow.fp8) == (machine.half / 2, 989.5e12)
    with pytest.raises(ShoalError, match="a100-80 has no rate fp8"):
        changed_machine(A100, "fp8=2x")


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


PLAN = ("plan", "--model", "llama-7b", "--machine", "a100-80", "--batch", "64")


def values(*words: str) -> Any:
    return json.loads(shoal(*PLAN, *words, "--json").stdout)


def test_each_number_has_the_fastest_layout_of_its_own_search() -> None:
    found = values("-n", "16,8")
    assert [each["devices"] for each in found["numbers"]] == [8, 16]
    for each in found["numbers"]:
        alone = values("-n", str(each["devices"]))
        assert each["best"] == alone["best"][0]
    assert found["cheapest"] is None


def test_a_deadline_chooses_the_cheapest_number_that_meets_it() -> None:
    training = "steps=10000,mtbf=5000,save=20,restart=300,price=2"
    free = values("-n", "8,16,32", "--training", training)
    prices = {each["devices"]: each["training"]["price"] for each in free["numbers"]}
    hours = {each["devices"]: each["training"]["seconds"] / 3600 for each in free["numbers"]}
    assert free["cheapest"] == min(prices, key=prices.__getitem__)
    deadline = 1.5 * hours[16]
    assert hours[16] < deadline < hours[8]
    late = values("-n", "8,16,32", "--training", f"{training},deadline={deadline}")
    in_time = [
        n for n in (16, 32) if late["numbers"][(8, 16, 32).index(n)]["training"]["in_time"] > 0.9
    ]
    assert late["cheapest"] == min(in_time, key=prices.__getitem__) != 8


def test_text_and_page(tmp_path: Path) -> None:
    training = ("--training", "steps=1000,price=2")
    done = shoal(*PLAN, "-n", "1,8,16", *training, "--html", str(tmp_path))
    assert done.exit_code == 0, done.exception
    assert "1 device: no configuration fits" in done.stdout
    assert "Least cost: 8 devices, with" in done.stdout
    page = (tmp_path / "index.html").read_text()
    for part in ("proportional to devices", "80 % from", "1 device: no configuration fits."):
        assert part in page
    late = shoal(*PLAN, "-n", "8,16", "--training", "steps=1000,deadline=0.01")
    assert "No number of devices meets the deadline" in " ".join(late.stdout.split())
    done = shoal(*PLAN, "--model", "gpt3-175b", "-n", "1,2", "--json")
    assert done.exit_code == 1
    assert [each["best"] for each in json.loads(done.stdout)["numbers"]] == [None, None]


def test_numbers_that_do_not_divide_the_batch_have_a_reason() -> None:
    found = values("-n", "8,37")["numbers"]
    assert found[0]["best"]
    assert "no layout splits 64 samples" in found[1]["reason"]
    assert "no layout splits 64 samples" in plan_error(*PLAN, "-n", "37,41").found


def test_a_training_that_does_not_end_has_a_reason() -> None:
    training = ("--training", "steps=100000,mtbf=3,save=20,restart=900")
    found = values("-n", "8,64", *training)["numbers"]
    assert found[0]["training"]
    assert "the training has not ended" in found[1]["reason"]


def test_lists_that_are_wrong() -> None:
    for text in ("", "0", "8,", "8,x", "8,8", "-4", "70000", "8 16"):
        error = plan_error(*PLAN, f"--devices={text}")
        assert "is repeated, or is not an integer from 1 to 65536" in error.found, text


def test_options_that_need_one_number() -> None:
    for words in (
        ("--what-if", "network=2x"),
        ("--submit", "1", "--", "train.py", "{layout}"),
        ("--check", "runs/a"),
        ("--model", "train.py:build"),
    ):
        error = plan_error(*PLAN, "-n", "8,16", *words)
        assert "one number of devices" in error.found, words
        assert error.fix == "use -n 8"
