"""`shoal run` with real processes: what ranks see, how a run ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import GONE_WITHIN, Command, wait_for
from helpers.ranks import free_port
from shoal.launcher.workers import GRACE

pytestmark = pytest.mark.processes


def full(*values: object) -> Any:
    """A row that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


RANKS = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

here = Path(__file__).parent
dist.init_process_group("gloo", init_method="env://")
rank, one = dist.get_rank(), torch.ones(1)
dist.all_reduce(one)
"""

TALK = """
while True:
    dist.all_reduce(one)
"""

# Ranks that only SIGKILL ends, one of them with children that do not notice.
STUCK = """
import subprocess
from torch.utils.data import DataLoader

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
batches = iter(DataLoader(range(10**6), num_workers=1)) if rank == 0 else None
if batches:
    next(batches)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
dist.all_reduce(one)
"""

WAIT = """
(here / f"ready{rank}").touch()
while True:
    time.sleep(1)
"""


Start = Callable[..., Command]


@pytest.mark.full
def test_a_script_sees_what_python_would_show_it(start_run: Start) -> None:
    script = """
        import atexit, inspect, json, multiprocessing, os, sys
        import torch, torch.distributed as dist

        class Mine:
            pass

        dist.init_process_group("gloo", init_method="env://")
        one = torch.ones(1)
        dist.all_reduce(one)
        seen = {
            "argv": sys.argv,
            "path": sys.path[0],
            "file": __file__,
            "name": __name__,
            "module": sys.modules["__main__"].Mine is Mine,
            "source": inspect.getsource(Mine).split()[1],
            "method": multiprocessing.get_start_method(),
            "threads": torch.get_num_threads(),
            "annotated": (lambda x: x).__annotations__,
            "sum": one.item(),
            "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
        }
        atexit.register(print, json.dumps(seen) + chr(10), end="")
    """
    run = start_run(script, "-n", "2", "script.py", "--", "--lr", "0.1", "--", "x y")
    ended = run.end()
    assert (ended.code, ended.err) == (0, "")
    plain = "import multiprocessing as m; print(m.get_start_method())"
    method = subprocess.check_output([sys.executable, "-c", plain], text=True).strip()
    ranks = [json.loads(line) for line in ended.out.splitlines()]
    assert sorted(seen.pop("local") for seen in ranks) == [["0", "2"], ["1", "2"]]
    for seen in ranks:
        assert seen == {
            "argv": ["script.py", "--lr", "0.1", "--", "x y"],
            "path": str(run.folder),
            "file": str(run.folder / "script.py"),
            "name": "__main__",
            "module": True,
            "source": "Mine:",
            "method": method,
            "threads": max(1, len(os.sched_getaffinity(0)) // 2),
            "annotated": {},
            "sum": 2.0,
        }
    assert list(run.temporary.iterdir()) == []


@pytest.mark.full
def test_files_named_like_standard_modules_hide_nothing(start_run: Start, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "sibling.py").write_text("value = 5")
    script = "import os, sibling; print(sibling.value, os.environ.get('PYTHONSAFEPATH'))"
    (folder / "script.py").write_text(script)
    (tmp_path / "pickle.py").write_text("raise RuntimeError('not the standard one')")
    ended = start_run("", "-n", "1", str(folder / "script.py")).end()
    assert (ended.code, ended.out, ended.err) == (0, "5 None\n", "")


@pytest.mark.full
def test_one_process_with_data_loaders_that_import_the_script_again(start_run: Start) -> None:
    script = """
        from torch.utils.data import DataLoader

        class Squares:
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index * index

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=method)
                print(method, sum(int(value) for value in loader))
    """
    ended = start_run(script, "-n", "1", "script.py").end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.split() == ["fork", "14", "spawn", "14", "forkserver", "14"]


@pytest.mark.full
def test_prints_appear_while_the_run_goes_on(start_run: Start) -> None:
    run = start_run("import time\nprint('first')\nwhile True: time.sleep(1)", "-n", "1", "script.py")
    assert run.process.stdout is not None
    assert run.process.stdout.readline() == "first\n"
    run.process.terminate()
    assert run.end().code == 143


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        full("raise ConnectionError('boom') from ValueError()", 1, "ConnectionError: boom"),
        full("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (signal 9)"),
        full("sys.exit(3)", 3, "ended with exit code 3"),
        full("sys.exit('no data')", 1, "no data"),
        full("os._exit(7)", 7, "ended with exit code 7"),
        (
            "from shoal.util.errors import DataError; raise DataError(given='a', found='b', fix='c')",
            1,
            "given: a\nfound: b\nfix:   c",
        ),
    ],
)
def test_the_first_failure_is_told_last_and_once(
    start_run: Start, line: str, code: int, told: str
) -> None:
    """FAILURES 17: its traceback, rank, host and line; nothing after it."""
    run = start_run(f"{RANKS}\nif rank == 1:\n    {line}\n{TALK}", "-n", "3", "script.py")
    ended = run.end()
    assert ended.code == code
    text, _, where = ended.err.rstrip("\n").rpartition("\n")
    assert told in text
    assert where.startswith(f"where: rank 1 of 3 on {os.uname().nodename}, ")
    if "kill" not in line and "_exit" not in line:
        number = RANKS.count("\n") + 3
        assert re.search(rf"script\.py:{number}[ ;]", where)
    assert ended.err.count(told) == 1
    assert ended.err.count("where:") == 1
    # Nothing of the ranks that only saw rank 1 go, of elastic, or of this launcher's own frames.
    for noise in ("peer", "elastic", "rank 0", "rank 2", "worker.py", "Exception ignored"):
        assert noise not in ended.err
    assert run.members() == []
    assert list(run.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("x = 1\nif x\n", "SyntaxError: expected ':'"),
        ("x = 1\nimport nothing_of_that_name\n", "No module named 'nothing_of_that_name'"),
    ],
)
@pytest.mark.full
def test_a_script_that_no_rank_can_load(start_run: Start, script: str, told: str) -> None:
    ended = start_run(script, "-n", "3", "script.py").end()
    assert ended.code == 1
    assert ended.err.count(told) == 1
    assert "script.py:2 " in ended.err.splitlines()[-1]


@pytest.mark.full
def test_stuck_ranks_and_their_children_are_gone_after_a_failure(start_run: Start) -> None:
    """FAILURES 17: long before the grace of ranks that save, and without an orphan."""
    fail = """
if rank == 1:
    raise ValueError("boom")
"""
    run = start_run(RANKS + STUCK + fail + TALK, "-n", "3", "script.py")
    ended = run.end()
    assert run.members() == []
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("signum", "code", "handler"),
    [
        (signal.SIGTERM, 143, "sys.exit(0)"),
        full(signal.SIGINT, 130, "sys.exit(0)"),
        full(signal.SIGHUP, 129, "sys.exit(0)"),
        full(signal.SIGINT, 130, "pass  # until a second Ctrl-C kills"),
    ],
)
def test_a_signal_is_passed_on_and_everything_ends(
    start_run: Start, signum: signal.Signals, code: int, handler: str
) -> None:
    saved = f"""
def save(number, frame):
    (here / f"saved{{rank}}").write_text(str(number))
    {handler}

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
"""
    run = start_run(RANKS + saved + WAIT, "-n", "2", "--grace", "600", "script.py")
    run.wait_ready(2)
    # As a terminal and a scheduler do: to every process in reach.
    os.killpg(run.process.pid, signum)
    if "second" in handler:
        wait_for(lambda: all((run.folder / f"saved{rank}").exists() for rank in range(2)))
        run.process.send_signal(signum)
    ended = run.end()
    assert (ended.code, ended.err) == (code, "")
    assert run.members() == []
    passed = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
    for rank in range(2):
        assert (run.folder / f"saved{rank}").read_text() == str(int(passed))


@pytest.mark.full
@pytest.mark.parametrize("ready", [False, True])
def test_a_signal_to_ranks_without_handlers_ends_all_quietly(start_run: Start, ready: bool) -> None:
    """Also while they start."""
    run = start_run(RANKS + WAIT, "-n", "2", "script.py")
    if ready:
        run.wait_ready(2)
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        # The fork server and its companion are there: torch is being imported, unless this comes late.
        wait_for(lambda: len(run.members()) >= 3)
        run.process.terminate()
    ended = run.end(timeout=3 * GONE_WITHIN)
    assert (ended.code, ended.out, ended.err) == (130 if ready else 143, "", "")
    assert run.members() == []


def test_no_rank_survives_a_launcher_that_is_killed(start_run: Start) -> None:
    run = start_run(RANKS + STUCK + WAIT, "-n", "2", "script.py")
    run.wait_ready(2)
    assert len(run.members()) >= 4
    run.process.kill()
    wait_for(lambda: run.members() == [])


@pytest.mark.full
def test_a_fixed_port_serves_every_attempt(start_run: Start) -> None:
    port = free_port()
    script = f"""{RANKS}
assert os.environ["MASTER_PORT"] == "{port}"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 1 and attempt == 0:
    raise ValueError("boom")
if attempt == 1:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(one)
dist.barrier()
"""
    ended = start_run(script, "-n", "2", "--restarts", "2", "--port", str(port), "script.py").end()
    assert ended.code == 0
    assert ended.err.endswith("restart 2 of 2\n")
    assert ended.err.count("killed by SIGKILL") == 1


@pytest.mark.long
def test_what_ranks_computed_counts_as_used_by_the_command(start_run: Start) -> None:
    """In `time`, and where a study asks which other programs were busy beside its jobs."""

    def used() -> float:
        times = resource.getrusage(resource.RUSAGE_CHILDREN)
        return times.ru_utime + times.ru_stime

    before = used()
    busy = "import time\nwhile time.process_time() < 2.5: pass\n"
    assert start_run(busy, "-n", "2", "script.py").end().code == 0
    # With what importing torch took.
    assert used() - before > 5


@pytest.mark.full
def test_the_library_function_works_in_a_script_without_a_guard(
    tmp_path: Path, start_command: Callable[..., Command]
) -> None:
    (tmp_path / "target.py").write_text("import sys; sys.exit(5)")
    # Processes that imported this script again would start runs of their own.
    call = f"print(run('target.py', processes=1, grace={GRACE}))\n"
    (tmp_path / "caller.py").write_text("from shoal.launcher.local import run\n" + call)
    ended = start_command([sys.executable, "caller.py"]).end()
    assert (ended.code, ended.out) == (0, "5\n")
