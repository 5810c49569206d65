"""`shoal bench data` with real workers: a dataset that waits, one of tensors, those that fail."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.commands import Command, wait_for
from shoal.tools.bench.data_loading.command import benchmark_data_loading
from shoal.tools.bench.measurement import Output

pytestmark = [pytest.mark.processes, pytest.mark.full]

SETS = """
import time
import torch
import shoal

class Waiting(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.02)  # a disk
        return torch.zeros(100), index

class Broken(Waiting):
    def __getitem__(self, index):
        raise ValueError("sample without a label")

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.zeros(3) for _ in range(100))

class Lengthless(torch.utils.data.Dataset):
    pass

def loader(world):
    return shoal.Loader(Waiting(), world, batch_size=8)

def tensors():
    return torch.randn(1000, 10), torch.zeros(1000)

def empty():
    return []
"""


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "sets_to_load.py").write_text(SETS)
    return f"{tmp_path}/sets_to_load.py"


def ask(target: str, *, csv: Path | None = None, **asked: Any) -> int:
    output = Output(csv=csv, json=True)
    return benchmark_data_loading(target, output=output, **{"seconds": 2.0, **asked})


def test_a_dataset_that_waits_without_workers_and_with_some(
    sets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "figures.csv"
    assert ask(f"{sets}:loader", workers=(0, 4), seconds=6.0, step_time=0.001, csv=table) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    alone, four = (each["trials"] for each in found["measured"])
    # How fast it is without workers at most is certain; with them, this machine's load decides.
    assert all(trial["rate"] < 50 for trial in alone)
    assert all(trial["rate"] > 0 for trial in four)
    assert all(trial["memory"] > 1 << 20 for trial in four)
    assert {trial["memory"] for trial in alone} == {None}
    assert found["stages"]["sample"] > 0.02
    assert found["stages"]["handed"] > 0
    assert lines[0].startswith("num_workers=")
    assert "no number is enough" in found["advice"][1]
    assert max(map(len, lines[:-2])) <= 80
    with table.open() as file:
        assert [row["workers"] for row in csv.DictReader(file)] == ["0"] * 3 + ["4"] * 3


def test_tensors_and_what_can_only_be_iterated(sets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(f"{sets}:tensors", workers=(0,), batch_sizes=(10, 50)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["batch_size"] for each in found["measured"]] == [10, 50]
    assert found["stages"]["collate"] is None
    assert ask(f"{sets}:Endless") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["workers"] for each in found["measured"]] == [0, 1]
    assert found["stages"] is None


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured(sets: str, start_command: Callable[..., Command]) -> None:
    """The terminal sends it to the workers too."""
    bench = [sys.executable, "-m", "shoal", "bench", "data", f"{sets}:loader"]
    running = start_command([*bench, "--seconds", "60", "--workers", "0,2"])
    wait_for(lambda: len(running.members()) >= 3)  # with workers
    os.killpg(running.process.pid, signal.SIGINT)
    ended = running.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    assert ended.out.startswith("num_workers=")
    assert "Traceback" not in ended.err


def test_what_can_not_be_measured(sets: str) -> None:
    for name, changed, found in (
        ("Broken", {"workers": (0,)}, "it raises ValueError: sample without a label"),
        ("Broken", {"workers": (1,)}, "it raises ValueError: sample without a label"),
        ("Lengthless", {}, "lacks __len__"),
        ("empty", {}, "without samples"),
        ("loader", {"batch_sizes": (9,)}, "whose batch size is 8"),
        ("tensors", {"seconds": 0.0}, "--seconds is a number above 0"),
        ("tensors", {"step_time": -1.0}, "--step-time is a number above 0"),
        ("tensors", {"run": Path("no_such_run")}, "no such directory"),
    ):
        with pytest.raises(shoal.ShoalError, match=found) as caught:
            ask(f"{sets}:{name}", **changed)
        assert "where:" not in str(caught.value), name


def test_what_a_run_needs_is_read_from_its_events(
    sets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    start = {"event": "start", "t": 1.0, "began": 1.0, "rank": 0, "size": 2}
    times = {"wait": 9.0, "forward": 0.01, "backward": 0.02, "update": 0.01}
    steps = [
        {"event": "step", "t": 2.0 + step, "name": "step", "step": step, "first": 64 * (step - 1)}
        | {"size": 64, "share": [64 * (step - 1), 64 * step - 32], "loss": 1.0, "norm": 1.0, **times}
        for step in range(1, 21)
    ]
    (folder / "rank-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (start, *steps)))
    assert ask(f"{sets}:tensors", workers=(0,), run=folder.parent) == 0
    need = json.loads(capsys.readouterr().out.splitlines()[-1])["need"]
    assert need["samples"] == 32
    assert need["seconds"] == pytest.approx(0.04, rel=1e-3)
