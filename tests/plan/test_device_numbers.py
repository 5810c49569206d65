"""`shoal plan -n 8,16`: which number of devices is cheapest, or meets a deadline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.cli import plan_error, shoal

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
    found = values("-n", "8,24")["numbers"]
    assert found[0]["best"]
    assert "no layout splits 64 samples" in found[1]["reason"]
    assert "no layout splits 64 samples" in plan_error(*PLAN, "-n", "24,48").found


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
