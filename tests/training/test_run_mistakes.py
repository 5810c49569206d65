"""Mistakes with a Run: each is told with what was given, what was found and a fix; nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.chdir(tmp_path)
    with shoal.init() as world:
        model = shoal.parallelize(nn.Linear(2, 2), world)
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
        data = (torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
        yield SimpleNamespace(world=world, step=step, loader=shoal.Loader(data, world, batch_size=4))


def open_run(given: SimpleNamespace, directory: str | Path = "runs/a") -> shoal.Run:
    return shoal.Run(directory, given.step, given.loader, trackers=())


def checkpoints(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory, "checkpoints").iterdir())


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
            with pytest.raises(shoal.CheckpointError) as raised:
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
        assert checkpoints("runs/a") == ["step-1", "step-2"]
    assert "step-1" in checkpoints("runs/a")


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


LOGGED: dict[str, tuple[Any, str]] = {
    "a number": (3, "an int"),
    "a name": ("loss", "a str"),
    "a list": ([1.0], "a list"),
    "a text": ({"loss": "low"}, "'loss' is 'low'"),
    "nothing": ({"loss": None}, "'loss' is None"),
    "a tensor of several": ({"loss": torch.ones(3)}, "'loss' is a tensor of 3 elements"),
    "a number for a name": ({3: 1.0}, "3 is not a name"),
}


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_no_number_by_name_is_not_logged(given: SimpleNamespace, name: str) -> None:
    values, found = LOGGED[name]
    with open_run(given) as run:
        for log in (given.world.log, run.log):
            with pytest.raises(shoal.StepError) as raised:
                log(values)
            assert found in raised.value.found
            assert raised.value.fix == 'world.log({"loss": 0.5})'
        given.world.log({"loss": torch.tensor([0.5]), "rate": 1, "exact": True})


def test_what_is_no_dict_is_not_noted(given: SimpleNamespace) -> None:
    with open_run(given) as run:
        with pytest.raises(shoal.StepError) as raised:
            run.note("data", 3)  # type: ignore[arg-type]
        assert raised.value.given == "run.note('data', 3)"
        run.note("data", {"rows": 3, "source": "a.csv"})
