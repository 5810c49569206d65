"""`shoal.launch` with real processes: what crosses, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.commands import GONE_WITHIN, Command, wait_for

pytestmark = pytest.mark.processes

Start = Callable[[str], Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script which calls shoal.launch."""
    commands: list[Command] = []

    def begin(script: str) -> Command:
        (tmp_path / "caller.py").write_text(textwrap.dedent(script))
        commands.append(Command([sys.executable, "caller.py", "--rate", "0.1"], tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


@pytest.mark.long
def test_a_script_without_a_guard_launches_again_and_again(start: Start) -> None:
    script = """
        import json, os, sys
        from dataclasses import dataclass
        import shoal

        FACTOR = 10

        @dataclass
        class Seen:
            rank: int
            size: int
            total: float
            given: str
            argv: list
            beside: bool
            folder: str

        def train(word, scale):
            import torch
            import neighbour
            with shoal.init() as world:
                one = torch.ones(1) * scale * FACTOR
                world.all_reduce(one)
                place = world.rank, world.size
                return Seen(*place, one.item(), word, sys.argv, neighbour.HERE, os.getcwd())

        found = []
        for processes in (2, 3, 1):
            found.append(shoal.launch(train, "word", 0.5, processes=processes))
        assert all(isinstance(seen, Seen) for seen in found[1])
        assert "torch" not in sys.modules
        print(json.dumps([[vars(seen) for seen in each] for each in found]))
        with shoal.init():
            print(shoal.launch(max, 3, 4, processes=2))
    """
    command = start(script)
    (command.folder / "neighbour.py").write_text("HERE = True")
    ended = command.end()
    assert ended.code == 0, ended.err
    first, last = ended.out.splitlines()
    assert last == "[4, 4]"
    for processes, ranks in zip((2, 3, 1), json.loads(first), strict=True):
        assert [seen.pop("rank") for seen in ranks] == list(range(processes))
        for seen in ranks:
            assert seen == {
                "size": processes,
                "total": 5.0 * processes,
                "given": "word",
                "argv": ["caller.py", "--rate", "0.1"],
                "beside": True,
                "folder": str(command.folder),
            }
    assert command.members() == []
    assert list(command.temporary.iterdir()) == []


@pytest.mark.long
def test_results_of_hundreds_of_megabytes(start: Start) -> None:
    script = """
        import hashlib, shoal

        def make():
            import os, torch
            rank = int(os.environ["RANK"])
            return torch.arange(25_000_000 * (2 - rank), dtype=torch.int64) + rank

        first, second = shoal.launch(make, processes=2)
        print(first.nbytes, int(first.sum()), second.nbytes, int(second.sum()))
    """
    ended = start(script).end(timeout=120)
    assert ended.code == 0, ended.err
    n, m = 50_000_000, 25_000_000
    assert ended.out.split() == [str(8 * n), str(n * (n - 1) // 2), str(8 * m), str(m * (m + 1) // 2)]


FAIL = """
import os, signal, sys, time
from pathlib import Path
import shoal

def work():
    here = Path.cwd()
    rank = int(os.environ["RANK"])
    (here / f"ready{rank}").touch()
    if rank == 1:
        LINE
    while True:
        time.sleep(1)

try:
    shoal.launch(work, processes=3)
except shoal.LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (signal 9)"),
        pytest.param("sys.exit(3)", "ended with exit code 3", marks=pytest.mark.full),
        pytest.param(
            "raise shoal.DataError(given='a', found='bad data', fix='c')",
            "bad data",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_fails(start: Start, line: str, told: str) -> None:
    command = start(FAIL.replace("LINE", line))
    ended = command.end()
    assert ended.code == 0, ended.err
    given, found, fix = ended.out.strip().splitlines()
    assert given == "given: launch(work, processes=3)"
    assert found.startswith(f"found: rank 1: {told}")
    if "kill" not in line:
        assert f"{command.folder / 'caller.py'}:11)" in found
    assert fix.startswith("fix:   see that rank's report above")
    # The report is the one of `shoal run`.
    assert told in ended.err
    assert ended.err.splitlines()[-1].startswith(f"where: rank 1 of 3 on {os.uname().nodename}, ")
    for noise in ("rank 0", "rank 2", "job.py", "worker.py"):
        assert noise not in ended.err
    assert command.members() == []


@pytest.mark.full
def test_the_launcher_itself_is_killed(start: Start) -> None:
    line = "import psutil; psutil.Process().parents()[1].kill(); time.sleep(60)"
    command = start(FAIL.replace("LINE", line))
    ended = command.end()
    assert "the process that starts the ranks ended early with exit code -9" in ended.out
    wait_for(lambda: command.members() == [], timeout=GONE_WITHIN)


# The launcher gives ranks longer to end than anybody here waits: what is gone sooner was killed sooner.
STUCK = """
import os, signal, subprocess, sys, time
from pathlib import Path
import shoal
from shoal.launcher import function

import_main = "from shoal.launcher.function_process import main"
long_grace = "from shoal.launcher import workers; workers.GRACE = GRACE"
assert import_main in function._PROGRAM
function._PROGRAM = function._PROGRAM.replace(import_main, f"{long_grace}; {import_main}")

def work():
    here, rank = Path.cwd(), int(os.environ["RANK"])
    asked = lambda number, _: (here / f"asked{rank}-{number}").touch()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, asked)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (here / f"ready{rank}").touch()
    while True:
        time.sleep(1)

try:
    shoal.launch(work, processes=2)
except KeyboardInterrupt:
    print("interrupted")
    raise
"""


def test_ctrl_c_is_passed_on_and_a_second_one_kills(start: Start) -> None:
    command = start(STUCK.replace("= GRACE", "= 600.0"))
    command.wait_ready(2)
    # As a terminal does: to all processes of the session.
    os.killpg(command.process.pid, signal.SIGINT)
    wait_for(lambda: all((command.folder / f"asked{rank}-2").exists() for rank in range(2)))
    os.killpg(command.process.pid, signal.SIGINT)
    ended = command.end(timeout=GONE_WITHIN)
    assert (ended.code, ended.out) == (-signal.SIGINT, "interrupted\n")
    assert "where: rank" not in ended.err
    assert command.members() == []
    assert list(command.temporary.iterdir()) == []


@pytest.mark.full
def test_ctrl_c_ends_ranks_that_do_nothing_about_it_at_once(start: Start) -> None:
    command = start(FAIL.replace("LINE", "pass"))
    command.wait_ready(3)
    os.killpg(command.process.pid, signal.SIGINT)
    ended = command.end(timeout=GONE_WITHIN)
    assert (ended.code, ended.out) == (-signal.SIGINT, "")
    assert ended.err.count("Traceback") == 1  # the caller's own
    assert command.members() == []


def test_ctrl_c_while_it_starts(start: Start) -> None:
    command = start(FAIL.replace("LINE", "pass"))
    wait_for(lambda: len(command.members()) >= 2)
    command.process.send_signal(signal.SIGINT)
    ended = command.end(timeout=3 * GONE_WITHIN)
    assert (ended.code, ended.out) == (-signal.SIGINT, "")
    assert ended.err.count("Traceback") == 1
    wait_for(lambda: command.members() == [], timeout=GONE_WITHIN)


@pytest.mark.full
def test_a_caller_that_is_killed_leaves_nothing(start: Start) -> None:
    command = start(STUCK.replace("= GRACE", "= 8.0"))
    command.wait_ready(2)
    assert len(command.members()) >= 6
    command.process.kill()
    wait_for(lambda: command.members() == [], timeout=GONE_WITHIN)
    # Ranks were asked first, and could have saved.
    assert (command.folder / f"asked1-{int(signal.SIGTERM)}").exists()
    assert list(command.temporary.iterdir()) == []


# What follows is called from the process of the tests, whose stdout is not the one it began with.


def shout() -> int:
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


def recover() -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and os.environ["RANK"] == "1":
        raise ValueError("not the first time")
    return attempt


@pytest.mark.full
def test_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal.launch(recover, processes=2, restarts=1) == ["1", "1"]
    assert capsys.readouterr().err.endswith("restart 1 of 1\n")


def leave() -> None:
    sys.exit(0)


@pytest.mark.full
def test_a_rank_that_leaves_returns_none() -> None:
    assert shoal.launch(leave, processes=1) == [None]


def nested() -> list[int]:
    return shoal.launch(shout, processes=2)


@pytest.mark.full
def test_a_rank_can_not_launch() -> None:
    with pytest.raises(shoal.LaunchError, match=r"is already rank \d of 2 of shoal run") as caught:
        shoal.launch(nested, processes=2)
    assert caught.value.given == "launch(nested, processes=2)"


def generator() -> Any:
    return (number for number in range(3))


@pytest.mark.full
def test_a_result_that_can_not_be_pickled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(shoal.LaunchError, match="rank 0: a generator that can't be pickled"):
        shoal.launch(generator, processes=1)
    assert "given: the result of generator\n" in capsys.readouterr().err


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
        shoal.launch(shout_at, 1, file, processes=2)


def shout_at(*_: object) -> None:
    pass


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("processes", [0, -1, 1.0, "2", True, None])
def test_numbers_that_can_not_work(processes: Any) -> None:
    with pytest.raises(shoal.LaunchError, match="processes must be an integer, at least 1") as caught:
        shoal.launch(shout, processes=processes)
    assert caught.value.given == f"launch(shout, processes={processes!r})"
    with pytest.raises(shoal.LaunchError, match="restarts must be an integer, at least 0"):
        shoal.launch(shout, processes=1, restarts=-1)


@pytest.mark.usefixtures("nothing_starts")
def test_a_function_that_was_called_already() -> None:
    work: Any = shout_at()  # type: ignore[func-returns-value]
    with pytest.raises(shoal.LaunchError, match="None is not callable"):
        shoal.launch(work, processes=2)
