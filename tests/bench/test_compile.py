"""`shoal bench modes`: ways that work are measured and alike, those that don't have a reason."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.tools.bench.compile import measure
from shoal.tools.bench.measurement import Output

pytestmark = [pytest.mark.processes, pytest.mark.full]

WAYS = ["Python loop", "torch operations", "TorchScript", "torch.compile"]


def ask(model: str | None = None, *, csv: Path | None = None, **changed: Any) -> int:
    usual = {"batch": 4, "seconds": 0.5, "output": Output(csv=csv, json=True)}
    return measure.benchmark_modes(model, **{**usual, **changed})


def found(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {(mode["subject"], mode["way"]): mode for mode in plain["modes"]}


def test_a_way_that_fails_is_a_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("\n  no C++ compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", missing)
    table = tmp_path / "modes.csv"
    assert ask(model="dense:width=8,layers=1,inputs=6", csv=table) == 0
    modes_of = found(capsys)
    ways = {measure.TOY.format(count): WAYS for count in measure.NUMBERS}
    ways["dense:width=8,layers=1,inputs=6"] = ["eager", "TorchScript", "torch.compile"]
    assert list(modes_of) == [(subject, way) for subject in ways for way in ways[subject]]
    for (_, way), mode in modes_of.items():
        if way == "torch.compile":
            assert mode["seconds"] is None
            assert mode["reason"] == "RuntimeError: no C++ compiler here"
        else:
            assert mode["low"] <= mode["seconds"] <= mode["high"]
            assert mode["difference"] < 1e-4
            assert mode["samples"] >= 3
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(modes_of)


@pytest.mark.long
def test_the_real_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "NUMBERS", (5,))
    assert ask() == 0
    compiled = found(capsys)[measure.TOY.format(5), "torch.compile"]
    if compiled["seconds"] is None:
        assert compiled["reason"]
    else:
        assert compiled["first"] > compiled["seconds"]
        assert compiled["difference"] < 1e-6


def test_what_can_not_be_measured() -> None:
    for changed, words in (
        ({"batch": 0}, "--batch is an integer, 1 or more"),
        ({"seconds": 0.0}, "--seconds is a number above 0"),
        ({"model": "no_such_model"}, "neither a built-in model"),
        ({"model": "no_such_package:f"}, "No module named"),
    ):
        with pytest.raises(shoal.ShoalError, match=words) as caught:
            ask(**changed)
        assert "where:" not in str(caught.value), changed
