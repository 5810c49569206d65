"""Launching from and into what is broken: closed streams, odd exceptions, results, paths."""

from __future__ import annotations

import functools
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.commands import GONE_WITHIN, Command, wait_for

Start = Callable[[str, str], Command]

pytestmark = [pytest.mark.processes, pytest.mark.full]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell command in which `python` is this one, beside the file `script.py`."""
    commands: list[Command] = []

    def begin(script: str, command: str) -> Command:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        shell = command.replace("python", shlex.quote(sys.executable), 1)
        commands.append(Command(["sh", "-c", shell], tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


CALLER = """
    import pathlib, shoal

    def work():
        print("said")
        return 7

    pathlib.Path("result").write_text(str(shoal.launch(work, processes=2)))
"""


@pytest.mark.parametrize("closed", [">&-", ">&- <&-", "2>&- <&-", ">&- 2>&- <&-"])
def test_a_caller_without_standard_files(start: Start, closed: str) -> None:
    command = start(CALLER, f"python script.py {closed}")
    ended = command.end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == ("" if ">&-" in closed.split() else "said\nsaid\n")
    assert (command.folder / "result").read_text() == "[7, 7]"
    wait_for(lambda: command.members() == [], timeout=GONE_WITHIN)


RANK = """
    import os, sys
    print("said")
    if os.environ["RANK"] == "1" and len(sys.argv) > 1:
        raise ValueError("boom")
"""


@pytest.mark.long
def test_ranks_without_standard_files(start: Start) -> None:
    for closed, code in ((">&-", 0), ("2>&-", 0), ("fail >&-", 1), ("fail 2>&-", 1)):
        for logs in ("", "--logs logs"):
            ended = start(RANK, f"python -m shoal run -n 2 {logs} script.py {closed}").end()
            assert ended.code == code, ended
            assert ended.out.count("said") == (0 if ">&-" in closed.split() else 1 if logs else 2)
            assert ended.err.count("ValueError: boom\n") == (closed == "fail >&-")


def test_a_report_that_nobody_reads_changes_nothing(start: Start) -> None:
    script = """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        open("again" + os.environ["RANK"], "w").close()
    """
    command = start(script, "(python -m shoal run -n 1 --restarts 1 script.py; echo $? >code) 2>&1 | :")
    command.end()
    assert (command.folder / "again0").exists()
    assert (command.folder / "code").read_text() == "0\n"


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
    assert f"{__file__.rsplit('/', 1)[-1]}:" in caught.value.found


class PickyError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def return_picky() -> Exception:
    return PickyError(1, 2)


def test_a_result_that_can_not_be_unpickled() -> None:
    with pytest.raises(shoal.LaunchError, match="the result of rank 0 can't be unpickled"):
        shoal.launch(return_picky, processes=1)


def test_what_python_ignores_in_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    monkeypatch.setattr(sys, "argv", [tmp_path, "--rate"])
    assert shoal.launch(max, 3, 4, processes=1) == [4]


def fail_with(_: Any) -> None:
    raise ValueError("boom")


def test_arguments_bound_to_a_function_are_not_shown() -> None:
    with pytest.raises(shoal.LaunchError) as caught:
        shoal.launch(functools.partial(fail_with, list(range(10_000))), processes=1)
    assert caught.value.given == "launch(partial, processes=1)"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_caller_that_has_closed_a_stream(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with open("/dev/null", "w") as closed:
        pass
    monkeypatch.setattr(sys, name, closed)
    assert shoal.launch(max, 3, 4, processes=1) == [4]
