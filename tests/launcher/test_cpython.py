"""Each private name of CPython that the launcher uses is there, and is used in one module."""

from __future__ import annotations

import atexit
import re
import subprocess
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest

NAMES = {
    "threading._shutdown": threading,
    "atexit._run_exitfuncs": atexit,
    "forkserver._forkserver": forkserver,
    "ForkServer._forkserver_pid": forkserver.ForkServer(),
    "ForkServer._stop": forkserver.ForkServer,
}


def test_this_python_has_private_names_which_no_other_module_uses(repository: Path) -> None:
    for name, place in NAMES.items():
        assert hasattr(place, name.partition(".")[2]), f"{name} is gone: see launcher/_cpython.py"
    private = re.compile(
        r"\b(?!self\b|cls\b)(atexit|threading|forkserver|multiprocessing|server)\._[a-z]"
    )
    found = [
        f"{path.name}:{number}"
        for path in sorted((repository / "src/shoal/launcher").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path.name != "_cpython.py" and private.search(line)
    ]
    assert found == []


def python(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.processes
def test_threads_end_before_exit_functions_run() -> None:
    text = """
import atexit, os, threading
from concurrent.futures import ThreadPoolExecutor
from shoal.launcher import _cpython
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread", flush=True))).start()
ThreadPoolExecutor(1).submit(print, "pool", flush=True).result()
atexit.register(print, "exit function", flush=True)
go.set()
_cpython.join_threads()
_cpython.run_exit_functions()
os._exit(0)
"""
    assert python(text).splitlines() == ["pool", "thread", "exit function"]


@pytest.mark.processes
def test_the_fork_server_is_killed_and_waited_for() -> None:
    text = """
import os
from multiprocessing import forkserver
from shoal.launcher import _cpython
forkserver.ensure_running()
process = forkserver._forkserver._forkserver_pid
_cpython.stop_fork_server()
_cpython.stop_fork_server()
print(forkserver._forkserver._forkserver_pid, os.path.exists(f"/proc/{process}"))
"""
    assert python(text).split() == ["None", "False"]
