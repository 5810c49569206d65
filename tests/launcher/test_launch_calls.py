"""`shoal.launch` from the process of the tests, whose stdout is not the one it began with."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal

pytestmark = pytest.mark.processes


def shout(*_: object) -> int:
    os.write(1, f"rank {os.environ['RANK']} says \xe9\n".encode("latin-1"))
    print("and complains", file=sys.stderr)
    return int(os.environ["RANK"])


@pytest.mark.full
def test_what_ranks_write_appears_where_the_caller_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[int] = []
    # A thread that is not the main one may launch too.
    thread = threading.Thread(target=lambda: found.extend(shoal.launch(shout, processes=2)))
    thread.start()
    thread.join()
    assert found == [0, 1]
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [
        "rank 0 says \N{REPLACEMENT CHARACTER}",
        "rank 1 says \N{REPLACEMENT CHARACTER}",
    ]
    assert err.count("and complains") == 2


def recover_or_leave() -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and os.environ["RANK"] == "1":
        raise ValueError("not the first time")
    if os.environ["RANK"] == "0":
        sys.exit(0)
    return attempt


@pytest.mark.full
def test_restarts_and_a_rank_that_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal.launch(recover_or_leave, processes=2, restarts=1) == [None, "1"]
    assert capsys.readouterr().err.endswith("restart 1 of 1\n")


def nested() -> list[int]:
    return shoal.launch(shout, processes=2)


def close_stdout() -> None:
    sys.stdout.close()
    raise ValueError("important")


def cause_itself() -> None:
    try:
        raise ValueError("circular")
    except ValueError as error:
        raise error from error


class NoMessageError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def say_nothing() -> None:
    raise NoMessageError


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (close_stdout, "rank 0: ValueError: important"),
        (cause_itself, "rank 0: ValueError: circular"),
        (say_nothing, "NoMessageError: <exception str"),
    ],
)
def test_odd_failures_are_told(function: Callable[[], None], told: str) -> None:
    with pytest.raises(shoal.LaunchError) as caught:
        shoal.launch(function, processes=1)
    assert told in caught.value.found
    assert f"{Path(__file__).name}:" in caught.value.found


class PickyError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def return_picky() -> Exception:
    return PickyError(1, 2)


def generator() -> Any:
    return (number for number in range(3))


@pytest.mark.full
def test_results_and_callers_that_can_not_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(shoal.LaunchError, match="rank 0: a generator that can't be pickled"):
        shoal.launch(generator, processes=1)
    assert "given: the result of generator\n" in capsys.readouterr().err
    with pytest.raises(shoal.LaunchError, match="the result of rank 0 can't be unpickled"):
        shoal.launch(return_picky, processes=1)
    with pytest.raises(shoal.LaunchError, match=r"is already rank \d of 2 of shoal run") as caught:
        shoal.launch(nested, processes=2)
    assert caught.value.given == "launch(nested, processes=2)"


def fail_with(_: Any) -> None:
    raise ValueError("boom")


@pytest.mark.full
def test_arguments_bound_to_a_function_are_not_shown() -> None:
    with pytest.raises(shoal.LaunchError) as caught:
        shoal.launch(functools.partial(fail_with, list(range(10_000))), processes=1)
    assert caught.value.given == "launch(partial, processes=1)"


@pytest.mark.full
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_streams_and_what_python_ignores_in_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    with open("/dev/null", "w") as closed:
        pass
    monkeypatch.setattr(sys, name, closed)
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    monkeypatch.setattr(sys, "argv", [tmp_path, "--rate"])
    assert shoal.launch(max, 3, 4, processes=1) == [4]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_what_can_not_be_pickled_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def work(*_: object) -> None:
        lock.acquire()

    with pytest.raises(shoal.LaunchError, match="the variable lock that it uses, lock"):
        shoal.launch(work, processes=2)
    with (
        open(tmp_path / "data", "w") as file,
        pytest.raises(shoal.LaunchError, match="argument 2, TextIOWrapper"),
    ):
        shoal.launch(shout, 1, file, processes=2)


@pytest.mark.usefixtures("nothing_starts")
def test_what_can_not_work() -> None:
    for processes in (0, -1, 1.0, "2", True, None):
        number: Any = processes
        with pytest.raises(shoal.LaunchError, match="is an integer, 1 or more") as caught:
            shoal.launch(shout, processes=number)
        assert caught.value.given == f"shoal.launch(processes={processes!r})"
        assert caught.value.found.startswith("processes ")
    with pytest.raises(shoal.LaunchError, match="restarts is an integer, 0 or more"):
        shoal.launch(shout, processes=1, restarts=-1)
    called_already: Any = None
    with pytest.raises(shoal.LaunchError, match="None is not callable"):
        shoal.launch(called_already, processes=2)
