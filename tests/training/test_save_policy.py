"""Saves that go on aside: what they hold, what they keep waiting, what becomes of one that fails."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.commands import wait_for
from helpers.killed_training import same
from helpers.ranks import RankError, Ranks
from helpers.small_training import events_of, saved, squared_error
from shoal.checkpoint import Checkpoints, Files
from shoal.training import save_policy
from shoal.util.errors import CheckpointError
from shoal.util.mounts import mount_of

pytestmark = pytest.mark.processes

STEPS = 8  # an epoch


class Gated(Files):
    """Writes once `open` exists, or refuses to; other operations are as ever."""

    def __init__(self, gate: Path, refusal: int | None = None) -> None:
        self._gate = gate
        self._refusal = refusal

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        wait_for(self._gate.exists)
        if self._refusal is not None and (self._gate / "refuse").exists():
            raise OSError(self._refusal, os.strerror(self._refusal))
        super().write(file, data)


def begin(world: shoal.World, directory: Path, **options: Any) -> shoal.Run:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = shoal.Step(model, optimizer, shoal.Task(squared_error))
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(32, 4, generator=generator), torch.randn(32, 2, generator=generator)
    loader = shoal.Loader(data, world, batch_size=4)
    return shoal.Run(directory, step, loader, trackers=(), **options)


def gate(run: shoal.Run, files: Files, **options: Any) -> None:
    run.files.checkpoints = Checkpoints(
        run.directory / "checkpoints", run.world, files=files, **options
    )


def weights(run: shoal.Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.steps["step"].model.parameters()]


def goes_on(world: shoal.World, directory: Path) -> dict[str, Any]:
    """Train while the save of step 2 can't write; then let it, and look at what it holds."""
    barrier = directory / "open"
    with begin(world, directory) as run:
        gate(run, Gated(barrier))
        then: list[Tensor] = []
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            run.tick(every=2 if run.step == 2 else None)
            if run.step == 2:
                then = weights(run)
        checkpoints = directory / "checkpoints"
        wait_for(lambda: any(checkpoints.glob("step-*")))  # the saving thread has begun
        during = [path.name for path in checkpoints.glob("step-*")]
        now = weights(run)
        world.barrier()  # all have looked
        barrier.mkdir(exist_ok=True)
    after = begin(world, directory)
    restored = after.restore()
    assert restored is not None
    moved = all(not torch.equal(a, b) for a, b in zip(then, now, strict=True))
    return {"during": during, "moved": moved, "same": same(then, weights(after)), "at": restored[:3]}


def test_training_goes_on_while_a_state_is_written_as_it_was(
    world: shoal.World, two: Ranks, tmp_path: Path
) -> None:
    expected = {"during": ["step-2.partial"], "moved": True, "same": True, "at": (2, 8, 0)}
    assert goes_on(world, tmp_path / "one") == expected
    assert two.call(goes_on, tmp_path / "two") == [expected] * 2


def test_the_next_save_waits_for_the_one_under_way(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long wait names the disk."""
    barrier = tmp_path / "open"
    lines: list[str] = []
    monkeypatch.setattr(save_policy, "SLOW_WAIT", 0.2)
    monkeypatch.setattr(world, "print", lines.append)
    with begin(world, tmp_path) as run:
        gate(run, Gated(barrier))
        batches = run.loader.epochs(1)
        for _ in range(2):
            run.steps["step"](next(batches))
            run.tick(every=2)
        blocked = threading.Thread(target=run.save)
        run.steps["step"](next(batches))
        blocked.start()
        wait_for(lambda: any("has waited" in line for line in lines))
        assert blocked.is_alive()
        barrier.mkdir()
        blocked.join(120)
        assert saved(tmp_path) == [2, 3]
    (said,) = [line for line in lines if "has waited" in line]
    where = (
        f"0.2 s for the save of step 2 in {tmp_path}/checkpoints ({' at '.join(mount_of(tmp_path))})"
    )
    assert where in said


def test_whoever_closes_waits_for_it(tmp_path: Path) -> None:
    """The Run, or the world where nobody closed the Run."""
    for closing in ("run", "world"):
        with shoal.init() as own:
            run = begin(own, tmp_path / closing)
            gate(run, Gated(tmp_path / closing / "open"))
            run.steps["step"](next(run.loader.epochs(1)))
            run.tick(every=1)
            opener = threading.Timer(0.1, (tmp_path / closing / "open").mkdir)
            opener.start()
            if closing == "run":
                run.close()
                assert saved(tmp_path / closing) == [1]
        assert saved(tmp_path / closing) == [1]
        opener.join()


def failing(world: shoal.World, directory: Path, code: int, must: bool) -> list[str]:
    """The save of step 2 fails on the last rank; steps 1 and, unless it must not, 3 are saved."""
    barrier = directory / "open"
    barrier.mkdir(parents=True, exist_ok=True)
    with begin(world, directory, must_save=must) as run:
        last = world.rank == world.size - 1
        gate(run, Gated(barrier, code if last else None))
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            if last and run.step == 2:
                (barrier / "refuse").touch()
            run.tick(every=1 if run.step <= (2 if must else 3) else None)
            run.files.checkpoints.background.wait()
            if last and run.step == 2:
                (barrier / "refuse").unlink()
    found = [f"{event['event']} {event['step']}" for event in events_of(directory, rank=world.rank)]
    return [text for text in found if text.startswith("save")]


def test_a_save_that_fails_is_told_and_training_goes_on(two: Ranks, tmp_path: Path) -> None:
    assert (
        two.call(failing, tmp_path, errno.ENOSPC, False) == [["save 1", "save_failed 2", "save 3"]] * 2
    )
    assert saved(tmp_path) == [1, 3]


def test_it_is_told_at_the_next_tick(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(world, tmp_path, errno.EDQUOT, False)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "was not saved" in line]
    assert told.startswith("shoal: the checkpoint of step 2 was not saved: rank 0: [Errno 122] ")
    assert "; training continues (free space there (quota shows your limit)" in told


def test_a_save_that_must_not_fail_ends_the_run_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    for result in two.attempt(failing, tmp_path, errno.ENOSPC, True):
        assert isinstance(result, RankError)
        assert isinstance(result.error, CheckpointError)
        assert "rank 1: [Errno 28] No space left on device" in result.error.found
    assert saved(tmp_path) == [1]
    assert (
        3 <= events_of(tmp_path, "step")[-1]["step"] < STEPS
    )  # at once, and not when the next save comes


def test_one_that_is_waited_for_raises_and_is_not_told_again(
    world: shoal.World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "open" / "refuse").mkdir(parents=True)
    with begin(world, tmp_path) as run:
        gate(run, Gated(tmp_path / "open", errno.EIO))
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            if run.step == 1:
                with pytest.raises(CheckpointError, match="Input/output error"):
                    run.save()
                (tmp_path / "open" / "refuse").rmdir()
                run.save()  # what failed is tried again, though nothing has moved
            run.tick()
    assert "was not saved" not in capsys.readouterr().out
    assert saved(tmp_path) == [1]


def timed(world: shoal.World, directory: Path, every: Any) -> list[int]:
    with begin(world, directory, keep=99) as run:
        for batch in run.loader.epochs(3):
            run.steps["step"](batch)
            run.tick(every=every)
    return saved(directory)


@pytest.mark.full
def test_time_decides_on_all_ranks_alike(two: Ranks, tmp_path: Path) -> None:
    always = timed_on(two, tmp_path / "always", timedelta(microseconds=1))
    assert len(always) > STEPS  # a look every second step at the latest
    assert timed_on(two, tmp_path / "never", timedelta(days=1)) == []
    assert timed_on(two, tmp_path / "rare", shoal.YoungDaly(mtbf=timedelta(days=900))) == []
    assert timed_on(two, tmp_path / "often", shoal.YoungDaly(mtbf=timedelta(microseconds=9))) != []


def timed_on(ranks: Ranks, directory: Path, every: Any) -> list[int]:
    first, second = ranks.call(timed, directory, every)
    assert first == second
    return list(first)


def test_the_interval_of_young_and_daly_costs_least() -> None:
    """Beside Daly's expected time per second of work, which is looked at point by point."""
    for cost, hours in itertools.product((0.01, 3.0, 60.0), (0.5, 24.0)):
        found = shoal.YoungDaly(mtbf=timedelta(hours=hours)).seconds(cost)

        def expected(interval: float, cost: float = cost, mean: float = 3600 * hours) -> float:
            return mean * math.expm1((interval + cost) / mean) / interval

        least = min(expected(found * (0.2 + 0.001 * step)) for step in range(4000))
        assert expected(found) == pytest.approx(least, rel=1e-4), (cost, hours)


def test_other_intervals_are_refused(world: shoal.World, tmp_path: Path) -> None:
    intervals: list[Any] = [0, True, 2.5, "10 min", timedelta(0)]
    with begin(world, tmp_path) as run:
        for every in intervals:
            with pytest.raises(CheckpointError, match=re.escape(repr(every))):
                run.tick(every=every)
    for mtbf in (timedelta(0), 3600):
        with pytest.raises(CheckpointError, match="is a positive timedelta"):
            shoal.YoungDaly(mtbf=mtbf)  # type: ignore[arg-type]


def test_what_is_kept(world: shoal.World, tmp_path: Path) -> None:
    with begin(world, tmp_path, keep=2, keep_every=3) as run:
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            run.tick(every=1)
            if run.step in (2, 5):
                run.save(to="best", wait=False)
    assert saved(tmp_path) == [3, 6, 7, 8]
    assert saved(tmp_path, "best") == [5]
    with pytest.raises(CheckpointError, match="keep_every=0"):
        begin(world, tmp_path, keep_every=0)


class Tags:
    """State of a user that is a set, which no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"tags": {"a", "b"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"config": {"data": {1, 2}}}, "info/config/data"),
        ({"state": {"tags": Tags()}}, "state/state/tags/tags"),
    ],
)
def test_what_can_not_be_saved_is_told_at_the_first_tick(
    world: shoal.World, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    # A preemption may bring the first save, after days.
    with begin(world, tmp_path, **options) as run:
        run.steps["step"](next(run.loader.epochs(1)))
        with pytest.raises(CheckpointError, match=where):
            run.tick()


def test_a_checkpoint_says_what_it_is_of(world: shoal.World, tmp_path: Path) -> None:
    with begin(world, tmp_path, config={"rate": 0.05, "data": "none"}) as run:
        assert run.save() == tmp_path / "checkpoints" / "step-0"
    manifest = tmp_path / "checkpoints" / "step-0" / "manifest.json"
    info = json.loads(manifest.read_text())["manifest"]["info"]["dict"]
    assert info["config"] == {"dict": {"rate": 0.05, "data": "none"}}
    assert info["versions"]["dict"]["torch"] == torch.__version__
    assert abs(info["time"] - time.time()) < 600


def replanned(world: shoal.World, directory: Path) -> int:
    with begin(world, directory, keep=9) as run:
        run.save()  # AdamW has no moments yet
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            run.tick(every=1)
    loaded = begin(world, directory).files.checkpoints.restore()
    assert loaded is not None
    return len(loaded.state["steps"]["step"]["optimizer"]["state"])


def test_a_state_that_grows_is_planned_anew(two: Ranks, tmp_path: Path) -> None:
    assert two.call(replanned, tmp_path) == [4, 4]
