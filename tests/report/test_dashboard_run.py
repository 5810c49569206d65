"""From the files of a run to what `shoal watch` says of it."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from helpers.synthetic_runs import BEGAN, Plant, lines, simulate, write
from shoal.tools.report.dashboard import watch
from shoal.tools.report.dashboard.curves import POINTS, Tracks
from shoal.tools.report.dashboard.snapshot import Snapshot
from shoal.tools.report.dashboard.snapshot_builder import KEEP, SnapshotBuilder

SLOW = Plant(part="wait", ranks=[1], seconds=8e-3, since=300)


class Clock:
    """Stands still until it is set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def seconds(parts: dict[str, np.ndarray[Any, Any]]) -> float:
    return float(parts["wall"].sum(axis=1).max())


def append(run: Path, rank: int, *events: dict[str, Any]) -> None:
    with (run / "events" / f"rank-{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def at(run: Path, later: float = 1.0) -> Snapshot:
    return SnapshotBuilder(run, now=Clock(BEGAN + later)).look()


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    parts = simulate(3, 600, [SLOW])
    write(tmp_path, parts, start={"goal": 64 * 2000, "epoch_size": 64 * 100})
    for rank in range(3):
        append(tmp_path, rank, {"event": "usage", "t": BEGAN + 5, "step": 9, "rss": 10**9 + rank})
    took = seconds(parts)
    snapshot = at(tmp_path, took + 2)
    assert snapshot.state.kind == "running"
    assert (snapshot.size, len(snapshot.ranks), snapshot.missing) == (3, 3, ())
    assert "data (rank 1 on node0)" in snapshot.verdict
    progress = snapshot.progress
    assert progress is not None
    assert progress.step == 600
    assert progress.goal == 64 * 2000
    assert progress.position == 64 * 600
    step = parts["wall"][0, -KEEP:].mean()
    assert progress.left == pytest.approx(1400 * step, rel=1e-3)
    assert progress.elapsed == pytest.approx(took + 2, abs=1e-3)
    slowest = snapshot.slowest
    assert slowest is not None
    assert (slowest.rank, slowest.host, slowest.part) == (1, "node0", "wait")
    assert slowest.excess == pytest.approx(8e-3, rel=0.1)
    assert slowest.since == pytest.approx(300, abs=3)
    assert [rank.memory for rank in snapshot.ranks] == [10**9, 10**9 + 1, 10**9 + 2]
    for each in snapshot.ranks:
        mean = parts["wall"][each.number, -snapshot.window :].mean()
        assert each.seconds == pytest.approx(mean, rel=1e-3)
    assert snapshot.ranks[1].parts["waiting"] < 0.2 * snapshot.ranks[0].parts["waiting"]
    assert snapshot.loss is not None
    assert (snapshot.loss.first, snapshot.loss.last) == (1, 600)
    assert snapshot.loss.now == pytest.approx(2.3 * np.exp(-1) + 0.1, rel=1e-3)


def test_looks_after_each_other_see_what_one_sees(tmp_path: Path) -> None:
    """Written in pieces that end within lines; since when a rank is slow is not forgotten."""
    parts = simulate(2, 1600, [SLOW])
    folder = tmp_path / "events"
    folder.mkdir()
    whole = {rank: "".join(line + "\n" for line in lines(parts, rank)) for rank in range(2)}
    clock = Clock(BEGAN)
    observer = SnapshotBuilder(tmp_path, now=clock, rest=0)
    assert observer.look().state.kind == "absent"
    pieces = 16
    for piece in range(pieces):
        for rank, text in whole.items():
            cut = [len(text) * n // pieces for n in (piece, piece + 1)]
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(text[slice(*cut)])
        clock.now += seconds(parts) / pieces
        snapshot = observer.look()
    once = at(tmp_path, clock.now - BEGAN)
    assert snapshot.progress == once.progress
    assert snapshot.loss is not None
    assert once.loss is not None
    assert snapshot.loss.last == once.loss.last == 1600
    np.testing.assert_allclose(snapshot.loss.values, once.loss.values, rtol=0.02)
    assert snapshot.slowest is not None
    assert snapshot.slowest.since == pytest.approx(300, abs=3)
    assert once.slowest is not None
    assert once.slowest.since is None


def test_little_is_held_of_a_long_run(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 3000))
    for _ in range(3):
        append(tmp_path, 0, *({"event": "log", "t": BEGAN, "loss": n} for n in range(2000)))
    observer = SnapshotBuilder(tmp_path)
    observer.look()
    reader = observer._reader
    assert reader is not None
    attempt = reader.history.attempts[0]
    assert attempt.last == 3000
    assert all(len(rows) <= 2 * KEEP for rows in attempt.steps.values())
    assert all(len(rows) >= KEEP for rows in attempt.steps.values())
    assert attempt.events == []


def test_curves_of_millions_of_steps_are_short_and_right() -> None:
    tracks = Tracks()
    for begin in range(0, 1_000_000, 512):
        steps = np.arange(begin, begin + 512)
        tracks.add(steps, np.sqrt(steps), np.full(512, 32), np.full(512, 0.5))
    loss, throughput = tracks.loss(), tracks.throughput()
    assert loss is not None
    assert throughput is not None
    assert POINTS / 2 < len(loss.values) <= POINTS
    assert (loss.first, loss.last) == (0, 1_000_447)
    middles = (np.arange(len(loss.values)) + 0.5) * 1024
    np.testing.assert_allclose(loss.values[1:-1], np.sqrt(middles)[1:-1], rtol=0.01)
    np.testing.assert_allclose(throughput.values, 64)


def test_steps_that_are_done_again_replace_those_before() -> None:
    tracks = Tracks()
    ones = np.ones(100)
    tracks.add(np.arange(1, 101), 5 * ones, ones, ones)
    tracks.add(np.arange(51, 151), 3 * ones, ones, ones)
    loss = tracks.loss()
    assert loss is not None
    assert (loss.first, loss.last) == (1, 150)
    assert loss.values == (5.0,) * 50 + (3.0,) * 100


def test_how_a_run_ended(tmp_path: Path) -> None:
    for events, kind, reason in (
        ([{"event": "end", "step": 50, "reason": "closed"}], "ended", "after step 50"),
        (
            [{"event": "end", "step": 50, "reason": "error", "error": "ValueError"}],
            "failed",
            "ValueError on rank 0 on node0, after step 50",
        ),
        (
            [
                {"event": "preempted", "by": "SIGTERM", "on": 1, "step": 50, "path": "x"},
                {"event": "end", "step": 50, "reason": "error", "error": "Stopped"},
            ],
            "preempted",
            "by SIGTERM on rank 1 after step 50",
        ),
        ([{"event": "interrupted", "by": 7, "on": "x", "step": None}], "interrupted", ""),
    ):
        write(tmp_path, simulate(2, 50))
        append(tmp_path, 0, *({"t": BEGAN + 10, **event} for event in events))
        state = at(tmp_path, 70).state
        assert (state.kind, state.reason, state.since) == (kind, reason, 60), events


def test_a_run_of_which_nothing_is_heard(tmp_path: Path) -> None:
    parts = simulate(2, 50)
    write(tmp_path, parts)
    state = at(tmp_path, seconds(parts) + 40).state
    assert state.kind == "silent"
    assert state.since == pytest.approx(40, abs=0.1)


def test_what_is_just_written_is_news_whatever_the_clocks_say(tmp_path: Path) -> None:
    """The clock of the machine that trains may be minutes behind."""
    write(tmp_path, simulate(2, 50))
    clock = Clock(BEGAN + 500)
    observer = SnapshotBuilder(tmp_path, now=clock)
    assert observer.look().state.kind == "silent"
    append(tmp_path, 0, {"event": "usage", "t": BEGAN, "step": 51})
    assert observer.look().state.kind == "running"
    clock.now += 100
    assert observer.look().state.kind == "silent"


def test_restarts_and_their_cause(tmp_path: Path) -> None:
    parts = simulate(2, 100)
    write(tmp_path, parts)
    append(tmp_path, 0, {"event": "preempted", "t": BEGAN + 9, "by": "SIGUSR1", "on": 1, "step": 100})
    write(tmp_path, parts, append=True, began=BEGAN + 100, first=100)
    write(tmp_path, parts, append=True, began=BEGAN + 200, first=150)
    snapshot = at(tmp_path, 205)
    assert snapshot.restarts.count == 2
    assert "fell silent after step 200" in snapshot.restarts.last
    assert snapshot.state.kind == "running"
    assert snapshot.progress is not None
    assert snapshot.progress.step == 250
    write(tmp_path, parts)
    append(tmp_path, 0, {"event": "preempted", "t": BEGAN + 9, "by": "SIGUSR1", "on": 1, "step": 100})
    write(tmp_path, parts, append=True, began=BEGAN + 100, first=100)
    last = at(tmp_path, 105).restarts.last
    assert last == "the previous attempt was preempted: by SIGUSR1 on rank 1 after step 100"


def save(step: int, time: float, **more: Any) -> dict[str, Any]:
    path = f"runs/a/checkpoints/step-{step}"
    said = {"event": "save", "step": step, "t": BEGAN + time, "seconds": 2.0, "blocked": 0.1}
    return {**said, "path": path, **more}


def test_the_last_checkpoint_and_the_next(tmp_path: Path) -> None:
    parts = simulate(2, 250)
    write(tmp_path, parts)
    assert at(tmp_path).saves.step is None
    append(tmp_path, 0, save(100, 2), save(200, 4), save(201, 5, path="runs/a/best/step-201"))
    saves = at(tmp_path, 6).saves
    assert (saves.step, saves.ago, saves.seconds, saves.blocked) == (200, 2, 2.0, 0.1)
    assert saves.next_step == 300
    assert saves.due == pytest.approx(50 * parts["wall"][0].mean(), rel=0.01)
    append(tmp_path, 0, {"event": "save_failed", "t": BEGAN + 7, "step": 300, "error": "disk full"})
    assert at(tmp_path, 8).saves.failed == "at step 300: disk full"


def test_checkpoints_by_the_clock_are_expected_by_it(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 250))
    append(tmp_path, 0, save(90, 60), save(210, 120))
    saves = at(tmp_path, 130).saves
    assert (saves.next_step, saves.due) == (None, 50)


def test_files_that_mean_harm(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    texts = ["\x1b[2J", [], {}, True, None, 1e400, -(10**30), "x" * 10**5]
    kinds = ("start", "save", "save_failed", "end", "preempted", "usage", "restore")
    fields = ("t", "by", "on", "step", "error", "path", "seconds", "blocked", "host", "goal", "size")
    with (folder / "rank-0.jsonl").open("w") as file:
        file.writelines(line + "\n" for line in lines(simulate(1, 30), 0))
        for kind in kinds:
            for text in texts:
                event = {"t": BEGAN, **dict.fromkeys(fields, text)} | {"event": kind, "began": BEGAN}
                file.write(json.dumps(event) + "\n")
    out = io.StringIO()
    assert watch(str(tmp_path), out=out) == 0
    assert "\x1b" not in out.getvalue()
    assert "step 30" in out.getvalue()


def test_one_plain_page_elsewhere_than_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, simulate(2, 250))
    before = {path: path.stat().st_mtime_ns for path in [*tmp_path.rglob("*"), tmp_path]}
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    assert watch(str(tmp_path), out=out) == 0
    page = out.getvalue().splitlines()
    assert max(map(len, page)) <= 80
    assert len(page) <= 30
    assert any("step 250" in line for line in page)
    assert before == {path: path.stat().st_mtime_ns for path in [*tmp_path.rglob("*"), tmp_path]}


def test_plain_pages_until_the_end(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 250))

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if "silent" in text:  # after the first page
                append(tmp_path, 0, {"event": "end", "t": time.time(), "step": 250, "reason": "closed"})
            return super().write(text)

    out = Out()
    assert watch(str(tmp_path), out=out, every=0.01) == 0
    assert "silent for" in out.getvalue()
    assert re.search(r"ended \d+ s ago", out.getvalue())


def test_without_a_run_one_page_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(shoal.CheckpointError):
            watch(str(path), out=io.StringIO())


def test_a_file_is_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(shoal.CheckpointError, match="it is a file"):
        watch(str(tmp_path / "file"), out=io.StringIO(), every=0.01)
