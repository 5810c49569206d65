"""Mistakes with a Run: each is told with what was given, what was found and a fix; nothing is lost."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.ranks import RankError, Ranks
from helpers.small_training import cross_entropy, saved, step_of
from shoal.util.errors import AgreementError, CheckpointError, LaunchError, StepError

pytestmark = pytest.mark.processes


@pytest.fixture
def given(world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.chdir(tmp_path)
    return parts(world)


def parts(world: shoal.World) -> SimpleNamespace:
    """What a Run of two batches needs."""
    step = step_of(world, nn.Linear(2, 2), cross_entropy)
    loader = shoal.Loader((torch.ones(8, 2), torch.zeros(8, dtype=torch.long)), world, batch_size=4)
    return SimpleNamespace(world=world, step=step, loader=loader)


def open_run(given: SimpleNamespace, directory: str | Path = "runs/a") -> shoal.Run:
    return shoal.Run(directory, given.step, given.loader, trackers=())


@pytest.mark.parametrize("again", ["runs/a", "runs/b/../a"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_run_whose_directory_a_later_one_has_is_told(
    given: SimpleNamespace, again: str, closed: bool
) -> None:
    """Not only at its next save: the steps until then would be lost."""
    batches = given.loader.epochs(1)
    with open_run(given) as run:
        given.step(next(batches))
        run.tick()
        run.save()
        later = open_run(given, again)
        if closed:
            later.close()
        for use in (run.tick, run.save, run.restore, lambda: run.log({"score": 1.0})):
            with pytest.raises(CheckpointError) as raised:
                use()
            assert raised.value.given == "a Run in runs/a"
            assert "this process opened there later" in raised.value.found
            assert "shoal.Run('runs/b', …)" in raised.value.fix
    if not closed:
        later.restore()
        given.step(next(given.loader.epochs(1)))
        later.tick()
        later.save()
        later.close()
    assert saved(Path("runs/a")) == ([1] if closed else [1, 2])


def test_a_directory_of_the_same_name_elsewhere_is_another(
    given: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(given) as run:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        open_run(given).close()
        run.log({"score": 1.0})


def test_a_directory_is_free_after_its_run_and_beside_it(given: SimpleNamespace) -> None:
    with open_run(given):
        with open_run(given, "runs/b"):
            pass
        given.world.log({"score": 1.0})  # goes to the first again
    open_run(given).close()
    with contextlib.suppress(ValueError), open_run(given):
        raise ValueError
    open_run(given).close()


@pytest.mark.parametrize("save", [False, True])
def test_a_loop_without_tick_is_told_at_the_end(
    given: SimpleNamespace, capsys: pytest.CaptureFixture[str], save: bool
) -> None:
    with open_run(given) as run:
        run.restore()
        for batch in given.loader.epochs(1):
            given.step(batch)
        if save:
            run.save()
    printed = "".join(capsys.readouterr())
    assert printed.count("run.tick") == 2
    assert "2 step(s) in runs/a without run.tick()" in printed
    assert "run.tick(every=100)" in printed
    assert ("no checkpoint" in printed) is not save


@pytest.mark.parametrize("case", ["ticked", "no step", "failed", "resumed"])
def test_other_ends_print_no_such_line(
    given: SimpleNamespace, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    with contextlib.suppress(ValueError), open_run(given) as run:
        for batch in given.loader.epochs(1):
            if case != "no step":
                given.step(batch)
            if case == "failed":
                raise ValueError
            if case in ("ticked", "resumed"):
                run.tick(every=1)
    if case == "resumed":
        with open_run(given) as run:
            run.restore()
    assert "without run.tick()" not in "".join(capsys.readouterr())


LOGGED: list[tuple[Any, str]] = [
    (3, "an int"),
    ("loss", "a str"),
    ([1.0], "a list"),
    ({"loss": "low"}, "'loss' is 'low'"),
    ({"loss": None}, "'loss' is None"),
    ({"loss": torch.ones(3)}, "'loss' is a tensor of 3 elements"),
    ({3: 1.0}, "3 is not a name"),
]


def test_what_is_no_number_by_name_is_not_logged_and_what_is_no_dict_not_noted(
    given: SimpleNamespace,
) -> None:
    with open_run(given) as run:
        for values, found in LOGGED:
            for log in (given.world.log, run.log):
                with pytest.raises(StepError) as raised:
                    log(values)
                assert found in raised.value.found
                assert raised.value.fix == 'world.log({"loss": 0.5})'
        given.world.log({"loss": torch.tensor([0.5]), "rate": 1, "exact": True})
        with pytest.raises(StepError) as raised:
            run.note("data", 3)  # type: ignore[arg-type]
        assert raised.value.given == "run.note('data', 3)"
        run.note("data", {"rows": 3, "source": "a.csv"})


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "3"},
        {"keep": 2.5},
        {"keep_every": 2.5},
        {"config": ["rate"]},
        {"config": {1: 2}},
        {"state": [1]},
        {"state": {1: nn.Linear(1, 1)}},
        {"state": {"a": object()}},
        {"state": {"a": nn.Linear}},
    ],
)
def test_options_that_can_not_be(given: SimpleNamespace, options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refused:
        shoal.Run("runs/a", given.step, given.loader, **options)
    assert f"{next(iter(options))}=" in refused.value.given
    assert not Path("runs/a/lock").exists()


def test_where_a_run_keeps_nothing_apart(given: SimpleNamespace) -> None:
    names: list[Any] = ["checkpoints", "events", "", ".", "../b", "a/b", "/b", "a\nb", 3]
    with open_run(given) as run:
        for batch in given.loader.epochs(1):
            given.step(batch)
            run.tick(every=1)
        for name in names:
            with pytest.raises(CheckpointError, match="next to checkpoints/"):
                run.save(to=name)
    assert saved(Path("runs/a")) == [1, 2]
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_a_directory_of_an_earlier_training_is_not_trained_in_from_the_start(
    given: SimpleNamespace,
) -> None:
    with open_run(given) as run:
        given.step(next(given.loader.epochs(1)))
        run.tick(every=1)
    again = parts(given.world)
    with open_run(again) as run:
        again.step(next(again.loader.epochs(1)))
        for use in (run.tick, run.save):
            with pytest.raises(CheckpointError, match=r"the latest: step-1(.|\n)*run.restore\(\)"):
                use()
        assert run.restore() is not None
    assert saved(Path("runs/a")) == [1]
    closed: list[Callable[[], object]] = [run.tick, run.save, run.restore]
    for each in closed:
        with pytest.raises(StepError, match=r"inside `with shoal\.Run"):
            each()


def after_the_end(world: shoal.World) -> list[str]:
    """What a world of two says when it is used after its end; the test's own world goes on."""
    closed = copy.copy(world)
    closed.group = None
    step = parts(world).step
    step.engine.world = closed
    uses = (
        lambda: shoal.evaluate(step, (torch.ones(3, 2), torch.zeros(3, dtype=torch.long))),
        lambda: closed.gather(1),
        lambda: closed.broadcast(1),
        lambda: closed.all_reduce(torch.ones(1)),
        closed.barrier,
    )
    found = []
    for use in uses:
        with pytest.raises(LaunchError) as raised:
            use()
        found.append(raised.value.found)
    return found


def test_a_world_that_has_ended_gives_no_parts_for_the_whole(two: Ranks) -> None:
    for rank, found in enumerate(two.call(after_the_end)):
        assert found == [f"rank {rank} has left the group and would use its local batch only"] * 5


def other_data(world: shoal.World, samples: int, shift: float, directory: Path) -> None:
    inputs = torch.ones(20 + world.rank * samples, 2)
    inputs[-1] += world.rank * shift
    shoal.Run(directory, parts(world).step, shoal.Loader((inputs,), world, batch_size=5))


@pytest.mark.parametrize(
    ("samples", "shift", "found"), [(1, 0.0, "the loader's "), (0, 0.5, "the loader's samples: ")]
)
def test_other_data_on_one_rank_is_named(
    samples: int, shift: float, found: str, two: Ranks, tmp_path: Path
) -> None:
    for result in two.attempt(other_data, samples, shift, tmp_path):
        assert isinstance(result, RankError)
        assert isinstance(result.error, AgreementError)
        assert result.error.given.startswith(found)
        assert "on rank 1 (" in result.error.found


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_on_a_full_disk_ends_no_training(
    given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    with open_run(given) as run:
        for batch in given.loader.epochs(1):
            given.step(batch)
            run.tick()
        given.world.print("trained")
        assert run.save().is_dir()


def train_where_the_directory_goes(world: shoal.World, directory: Path, every: int | None) -> None:
    given = parts(world)
    with open_run(given, directory) as run:
        for batch in given.loader.epochs(2):
            given.step(batch)
            if given.step.number == 2:
                world.barrier()
                if world.is_rank_zero:
                    shutil.rmtree(directory)
                world.barrier()
            run.tick(every=every)


@pytest.mark.parametrize("every", [3, None])
def test_a_run_whose_directory_is_removed_ends_with_an_error(
    two: Ranks, tmp_path: Path, every: int | None
) -> None:
    """At the next save, or when the Run is closed."""
    directory = tmp_path / "run"
    with pytest.raises(AssertionError, match=f"{directory} was removed while the run was open"):
        two.call(train_where_the_directory_goes, directory, every)
    assert not directory.exists()
