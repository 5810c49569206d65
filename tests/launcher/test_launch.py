"""`shoal.launch` with real processes: what crosses, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import GONE_WITHIN, Command, wait_for

pytestmark = pytest.mark.processes

Start = Callable[[str], Command]


@pytest.fixture
def start(tmp_path: Path, start_command: Callable[..., Command]) -> Start:
    """Starts a script which calls shoal.launch."""

    def begin(script: str) -> Command:
        (tmp_path / "caller.py").write_text(textwrap.dedent(script))
        return start_command([sys.executable, "caller.py", "--rate", "0.1"])

    return begin


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

        def make():  # hundreds of megabytes
            import torch
            rank = int(os.environ["RANK"])
            return torch.arange(25_000_000 * (2 - rank), dtype=torch.int64) + rank

        print(*((large.nbytes, int(large.sum())) for large in shoal.launch(make, processes=2)))
        with shoal.init():
            print(shoal.launch(max, 3, 4, processes=2))
    """
    command = start(script)
    (command.folder / "neighbour.py").write_text("HERE = True")
    ended = command.end()
    assert ended.code == 0, ended.err
    first, large, last = ended.out.splitlines()
    n, m = 50_000_000, 25_000_000
    assert large == f"{(8 * n, n * (n - 1) // 2)} {(8 * m, m * (m + 1) // 2)}"
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
    wait_for(lambda: command.members() == [])


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
    ended = command.end()
    assert (ended.code, ended.out) == (-signal.SIGINT, "interrupted\n")
    assert "where: rank" not in ended.err
    assert command.members() == []
    assert list(command.temporary.iterdir()) == []


@pytest.mark.parametrize("ready", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ctrl_c_ends_ranks_that_do_nothing_about_it_at_once(start: Start, ready: bool) -> None:
    """Also while they start."""
    command = start(FAIL.replace("LINE", "pass"))
    if ready:
        command.wait_ready(3)
        os.killpg(command.process.pid, signal.SIGINT)
    else:
        wait_for(lambda: len(command.members()) >= 2)
        command.process.send_signal(signal.SIGINT)
    ended = command.end(timeout=3 * GONE_WITHIN)
    assert (ended.code, ended.out) == (-signal.SIGINT, "")
    assert ended.err.count("Traceback") == 1  # the caller's own
    wait_for(lambda: command.members() == [])


@pytest.mark.full
def test_a_caller_that_is_killed_leaves_nothing(start: Start) -> None:
    command = start(STUCK.replace("= GRACE", "= 8.0"))
    command.wait_ready(2)
    assert len(command.members()) >= 6
    command.process.kill()
    wait_for(lambda: command.members() == [])
    # Ranks were asked first, and could have saved.
    assert (command.folder / f"asked1-{int(signal.SIGTERM)}").exists()
    assert list(command.temporary.iterdir()) == []


@pytest.fixture
def shell(tmp_path: Path, start_command: Callable[..., Command]) -> Callable[[str, str], Command]:
    """Starts a shell command in which `python` is this one, beside the file `script.py`."""

    def begin(script: str, command: str) -> Command:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        return start_command(["sh", "-c", command.replace("python", shlex.quote(sys.executable), 1)])

    return begin


Shell = Callable[[str, str], Command]

CALLER = """
    import pathlib, shoal

    def work():
        print("said")
        return 7

    pathlib.Path("result").write_text(str(shoal.launch(work, processes=2)))
"""


@pytest.mark.full
@pytest.mark.parametrize("closed", [">&-", ">&- <&-", "2>&- <&-", ">&- 2>&- <&-"])
def test_a_caller_without_standard_files(shell: Shell, closed: str) -> None:
    command = shell(CALLER, f"python script.py {closed}")
    ended = command.end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == ("" if ">&-" in closed.split() else "said\nsaid\n")
    assert (command.folder / "result").read_text() == "[7, 7]"
    wait_for(lambda: command.members() == [])


RANK = """
    import os, sys
    print("said")
    if os.environ["RANK"] == "1" and len(sys.argv) > 1:
        raise ValueError("boom")
"""


@pytest.mark.long
def test_ranks_without_standard_files(shell: Shell) -> None:
    for closed, code in ((">&-", 0), ("2>&-", 0), ("fail >&-", 1), ("fail 2>&-", 1)):
        for logs in ("", "--logs logs"):
            ended = shell(RANK, f"python -m shoal run -n 2 {logs} script.py {closed}").end()
            assert ended.code == code, ended
            assert ended.out.count("said") == (0 if ">&-" in closed.split() else 1 if logs else 2)
            assert ended.err.count("ValueError: boom\n") == (closed == "fail >&-")


@pytest.mark.full
def test_a_report_that_nobody_reads_changes_nothing(shell: Shell) -> None:
    script = """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        open("again" + os.environ["RANK"], "w").close()
    """
    command = shell(script, "(python -m shoal run -n 1 --restarts 1 script.py; echo $? >code) 2>&1 | :")
    command.end()
    assert (command.folder / "again0").exists()
    assert (command.folder / "code").read_text() == "0\n"
