"""`shoal last-exit`: what the ranks of the last attempt have recorded, whatever a launcher says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from helpers import mpirun
from helpers.commands import Command
from shoal.telemetry.events import path_of
from shoal.tools.report.last_exit import last_exit
from shoal.util.errors import CheckpointError

TRAIN = """
import os, signal, sys, time
import torch, shoal

how = sys.argv[1]

def loss(output, batch):
    return output.square().sum(), len(output)

with shoal.init(device="cpu") as world:
    model = shoal.parallelize(torch.nn.Linear(3, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), 0.1), shoal.Task(loss))
    data = shoal.Loader((torch.ones(40, 3),), world, batch_size=4)
    with shoal.Run("run", step, data) as run:
        run.restore()
        for batch in data.epochs(2):
            step(batch)
            if step.number == 5 and world.rank == 1:
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGTERM)
                if how == "raise":
                    raise ValueError("no")
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
            run.tick()
    if how == "late" and world.rank == 1:
        sys.exit(3)
"""


def record(
    folder: Path, rank: int, *events: Mapping[str, object], began: float = 1.0, size: int = 2
) -> None:
    path = path_of(folder, rank)
    path.parent.mkdir(exist_ok=True)
    lines = [{"event": "start", "began": began, "size": size}, *events]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


CLOSED = {"event": "end", "reason": "closed"}
SAVED = {"event": "preempted"}
RAISED = {"event": "end", "reason": "error", "error": "ValueError"}


@pytest.mark.parametrize(
    ("first", "second", "code", "text"),
    [
        ([CLOSED], [CLOSED], 0, "rank 0-1 finished (of 2)"),
        ([SAVED, CLOSED], [SAVED, CLOSED], 75, "rank 0-1 preempted (of 2)"),
        ([{"event": "interrupted"}, CLOSED], [{"event": "interrupted"}, CLOSED], 130, "interrupted"),
        ([SAVED, CLOSED], [CLOSED], 1, "rank 0 preempted; rank 1 finished"),
        ([SAVED, CLOSED], [SAVED], 1, "rank 0 preempted; rank 1 was killed, or still runs"),
        ([SAVED, CLOSED], None, 1, "rank 1 has recorded no start"),
        (
            [{"event": "end", "reason": "error", "error": "ValueError"}],
            [],
            1,
            "rank 0 raised ValueError",
        ),
    ],
)
def test_every_rank_counts(
    first: list[Mapping[str, object]],
    second: list[Mapping[str, object]] | None,
    code: int,
    text: str,
    tmp_path: Path,
) -> None:
    record(tmp_path, 0, *first)
    if second is not None:
        record(tmp_path, 1, *second)
    found = last_exit(tmp_path)
    assert found.code == code
    assert text in found.text


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    assert last_exit(tmp_path).code == 1
    for rank in (0, 1):
        record(tmp_path, rank, SAVED, CLOSED)
    record(tmp_path, 0, CLOSED, began=2.0, size=1)
    assert last_exit(tmp_path).code == 0
    record(tmp_path, 0, SAVED, CLOSED, began=3.0)
    # Rank 1 ended before it had opened the run again.
    assert last_exit(tmp_path).text == "rank 0 preempted; rank 1 has recorded no start (of 2)"


def test_records_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    for rank in (0, 1):
        record(tmp_path, rank, SAVED, CLOSED)
        os.utime(path_of(tmp_path, rank), (100, 100))
    started = tmp_path / "started"
    started.touch()
    assert last_exit(tmp_path, newer=started).code == 1
    os.utime(started, (50, 50))
    assert last_exit(tmp_path, newer=started).code == 75


@pytest.mark.parametrize(
    "damage",
    [
        {"began": None},
        {"began": "x"},
        {"began": float("nan")},
        {"size": 10**9},
        {"size": 0},
        {"size": []},
    ],
)
def test_a_damaged_start_is_none(damage: Mapping[str, object], tmp_path: Path) -> None:
    record(tmp_path, 0, SAVED, CLOSED)
    record(tmp_path, 1, {"event": "start", "began": 1.0, "size": 2, **damage}, SAVED, CLOSED)
    found = last_exit(tmp_path)
    assert (found.code, found.text) == (1, "rank 0 preempted; rank 1 has recorded no start (of 2)")


def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 0, SAVED, CLOSED, size=1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        last_exit(tmp_path)
    assert "no such directory" in last_exit(tmp_path / "missing").text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "how", "code"),
    [
        ("shoal", "stop", 75),
        pytest.param("shoal", "die", 1, marks=pytest.mark.full),
        *(
            pytest.param(program, how, code, marks=[pytest.mark.system])
            for program in mpirun.PROGRAMS
            for how, code in (("stop", 75), ("none", 0), ("raise", 1), ("die", 1))
        ),
    ],
)
def test_under_real_launchers(
    program: str, how: str, code: int, tmp_path: Path, start_command: Callable[..., Command]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    if program == "shoal":
        launcher = [sys.executable, "-m", "shoal", "run", "-n", "2"]
    else:
        launcher = mpirun.command(program, 2, tmp_path)
    ended = start_command([*launcher, "train.py", how]).end()
    told = start_command([sys.executable, "-m", "shoal", "last-exit", "run"]).end()
    assert told.code == code, (told, ended)
    assert ("preempted (of 2)" in told.out) == (how == "stop")
