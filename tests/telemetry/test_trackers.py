"""Curves in real trackers: one run goes on after a restart, without a jump back."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers.checkpoint_files import small_run
from helpers.commands import wait_for
from helpers.ranks import Ranks
from shoal.telemetry.trackers.continued import SentSteps
from shoal.util import regular_file
from shoal.util.errors import LaunchError, StepError

pytestmark = pytest.mark.processes


def train(world: shoal.World, directory: Path, stop: int, trackers: Any = None) -> None:
    """Up to step `stop`, saving at step 4, with a number that tells the attempt's steps apart."""
    with small_run(world, directory, trackers=trackers) as run:
        run.restore()
        for batch in run.loader.epochs(9):
            result = run.steps["step"](batch)
            world.log({"loss": result.loss, "half": torch.tensor(run.step / 2)})
            run.tick(every=4)
            if run.step == stop:
                break


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_is_the_default_and_goes_on_where_the_run_does(
    world: shoal.World, tmp_path: Path
) -> None:
    train(world, tmp_path, 6)  # two steps beyond its checkpoint
    train(world, tmp_path, 9)
    assert curve(tmp_path, "half") == [(step, step / 2) for step in range(1, 10)]
    lines = (tmp_path / "events/rank-0.jsonl").read_text().splitlines()
    logged = [event for event in map(json.loads, lines) if event["event"] == "log"]
    assert [event["step"] for event in logged] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]


def test_curves_are_rank_0s(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.call(train_quietly, tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert len(curve(tmp_path, "loss")) == 3


def killed_at_step_6(world: shoal.World, directory: Path) -> None:
    """No close, no exit handler: what was not handed over by then is lost."""
    with pytest.MonkeyPatch.context() as patch:
        tick = shoal.Run.tick

        def tick_and_die(run: shoal.Run, *, every: int | None = None) -> None:
            tick(run, every=every)
            if run.step == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        patch.setattr(shoal.Run, "tick", tick_and_die)
        train(world, directory, 9)


def test_tensorboard_goes_on_after_a_kill_without_a_gap(world: shoal.World, tmp_path: Path) -> None:
    """FAILURES 30: one curve, each step once and in order, though the first attempt closed nothing."""
    with Ranks(1) as ranks:
        assert ranks.call_until_killed(killed_at_step_6, tmp_path) is None
    (first,) = (tmp_path / "tensorboard").iterdir()
    begun = int(first.name.split(".")[3])
    while int(time.time()) <= begun:  # files are read in the order of the second in their names
        time.sleep(0.01)
    train(world, tmp_path, 9)
    assert curve(tmp_path, "half") == [(step, step / 2) for step in range(1, 10)]


def recorded(path: Path) -> list[tuple[int, float]]:
    """Steps and numbers in a file of wandb's: blocks of 32 KiB, records of checksum, length, kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # it is being written
            break
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            history = Record.FromString(record).history
            values = {item.key or item.nested_key[0]: item.value_json for item in history.item}
            if "half" in values:
                found.append((history.step.num, float(values["half"])))
            record = b""
    return found


def train_quietly(world: shoal.World, directory: Path) -> None:
    train(world, directory, 3)


@pytest.mark.full
def test_wandb_is_one_run_whose_steps_never_go_back(world: shoal.World, tmp_path: Path) -> None:
    """FAILURES 30: the second attempt, which takes steps 5 and 6 again, sends none below the last."""
    options = (shoal.WandB(project="tests", mode="offline"),)
    train(world, tmp_path, 6, options)
    before = json.loads((tmp_path / "wandb.json").read_text())
    assert (before["sent"], before["names"]) == (6, ["half", "loss"])
    train(world, tmp_path, 9, options)
    after = json.loads((tmp_path / "wandb.json").read_text())
    assert after == before | {"sent": 9}
    runs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in runs] == [f"run-{before['id']}"] * 2
    wanted = [[(step, step / 2) for step in range(*ends)] for ends in ((1, 7), (7, 10))]

    def attempts() -> list[list[tuple[int, float]]]:
        return sorted(recorded(path) for path in runs)

    # W&B's own service may still be writing what it was given.
    wait_for(lambda: attempts() == wanted, every=0.1, told=lambda: str(attempts()))


@pytest.mark.full
def test_a_kill_leaves_no_half_note_of_wandb(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (shoal.WandB(project="tests", mode="offline"),)
    train(world, tmp_path, 3, options)
    before = (tmp_path / "wandb.json").read_text()
    whole = regular_file.write_new

    def die(path: Path, text: str) -> None:
        whole(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(regular_file, "write_new", die)
    with pytest.raises(KeyboardInterrupt):
        train(world, tmp_path, 4, options)
    monkeypatch.undo()
    assert (tmp_path / "wandb.json").read_text() == before


class Kept:
    """A tracker that keeps what it is given, and raises `error` in the methods named in `fails`."""

    def __init__(self, fails: str = "", error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def _called(self, *call: Any) -> None:
        failed = any(name == self.fails for name, *_ in self.calls)
        assert not failed or call == ("close",), "it was left out"
        self.calls.append(call)
        if call[0] == self.fails and self.error is not None:
            raise self.error

    def open(self, directory: Path, step: int) -> Kept:
        self._called("open", step)
        return self

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._called("write", step)

    def flush(self) -> None:
        self._called("flush")

    def saved(self, path: str, step: int) -> None:
        self._called("saved", path, step)

    def close(self) -> None:
        self._called("close")


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("flush", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ("write", RuntimeError("No space left")),
        ("saved", ValueError("No space left")),
        ("close", RuntimeError("No space left")),
    ],
)
def test_a_tracker_that_fails_ends_its_curves_and_nothing_else(
    world: shoal.World, tmp_path: Path, fails: str, error: Exception
) -> None:
    """Of several ranks only the first has trackers: the others would wait for it."""
    tracker = Kept(fails, error)
    with pytest.warns(UserWarning, match="tracker Kept stopped.*No space left"):
        train(world, tmp_path, 9, (tracker, shoal.TensorBoard()))
    assert tracker.calls[-1] == ("close",)  # which writes what it has kept
    assert (tmp_path / "checkpoints/step-8").is_dir()
    assert curve(tmp_path, "half") == [(step, step / 2) for step in range(1, 10)]


def test_a_tracker_hears_of_each_complete_checkpoint(world: shoal.World, tmp_path: Path) -> None:
    tracker = Kept()
    train(world, tmp_path, 9, (tracker,))
    saved = [call[1:] for call in tracker.calls if call[0] == "saved"]
    checkpoints = tmp_path / "checkpoints"
    assert [step for _, step in saved] == [4, 8]
    assert [Path(path) for path, _ in saved] == [checkpoints / f"step-{n}" for n in (4, 8)]
    assert tracker.calls[-1] == ("close",)


def test_a_tracker_class_is_refused(world: shoal.World, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="trackers is a sequence of trackers"):
        train(world, tmp_path, 1, (shoal.TensorBoard,))


class Forgetful:
    """A tracker whose open returns nothing."""

    def open(self, directory: Path, step: int) -> Any:
        return None


def test_what_a_tracker_opens_is_checked(world: shoal.World, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="without write, flush, saved, close"):
        train(world, tmp_path, 1, (Forgetful(),))


def test_values_that_a_tracker_has_are_not_sent_twice(tmp_path: Path) -> None:
    sent = SentSteps(tmp_path / "note.json", 3)
    assert sent.new({"loss": 1.0}, 3) == {"loss": 1.0}  # no tracker had it
    sent.begin("abc")
    sent.add({"loss": 1.0}, 5)
    resumed = SentSteps(tmp_path / "note.json", 4)  # killed between two calls in step 5
    assert resumed.id == "abc"
    assert resumed.new({"loss": 1.0}, 4) == {}
    assert resumed.new({"loss": 1.0, "other": 2.0}, 5) == {"other": 2.0}
    assert resumed.new({"loss": 1.0}, 6) == {"loss": 1.0}


def test_without_trackers_or_a_run_numbers_go_nowhere(world: shoal.World, tmp_path: Path) -> None:
    train(world, tmp_path, 2, ())
    assert not (tmp_path / "tensorboard").exists()
    with pytest.raises(LaunchError, match="no Run is open"):
        world.log({"loss": 1.0})
