from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cli import refused
from helpers.cli import shoal as command
from shoal.launcher import local
from shoal.util.errors import LaunchError


@pytest.fixture(autouse=True)
def signals_of_this_process() -> Iterator[None]:
    """`shoal run` ends with its process, and leaves signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shoal(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('this must not be started')\n")
    return str(path)


def test_help_names_the_command_and_imports_little() -> None:
    """How quick it is benchmarks/start.py measures; nearly all of its time goes into imports."""
    done = shoal("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "run" in done.stdout
    probe = (
        "import sys\nsys.argv = ['shoal', '--help']\nfrom shoal.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, check=True
    )
    heavy, count = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    assert int(count) < 360  # rich draws the panels


def test_version() -> None:
    done = command("--version")
    assert done.exit_code == 0
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\S*\n", done.output)


def test_numbers_that_cannot_work(script: str) -> None:
    for options, given in (
        (["-n", "0"], "-n 0"),
        (["-n", "-2"], "-n -2"),
        (["-n", "two"], "-n two"),
        (["-n", "1.5"], "-n 1.5"),
        (["-n", "1", "--restarts", "-1"], "--restarts -1"),
        (["-n", "1", "--port", "70000"], "--port 70000"),
        (["-n", "1", "--port", "http"], "--port http"),
    ):
        error = refused("run", *options, script)
        assert error.given == given, options
        assert error.fix, options


def test_all_after_the_script_but_the_first_two_dashes_are_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal run` and `shoal submit` split a command in the same way."""
    given: list[list[str]] = []
    monkeypatch.setattr(local, "run", lambda script, args, **_: given.append(args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    options = ["--time", "10:00", "--dry-run", "--no-copy", "--python", sys.executable]
    for words, arguments in (
        ("", []),
        ("graph", ["graph"]),
        ("--micro 3", ["--micro", "3"]),
        ("-- --micro 3", ["--micro", "3"]),
        ("graph -- --micro 3", ["graph", "--micro", "3"]),
        ("-n 3 -- -n 4", ["-n", "3", "-n", "4"]),
        ("graph -- --micro 3 -- rest", ["graph", "--micro", "3", "--", "rest"]),
        ("-- --", ["--"]),
    ):
        command("run", "-n", "2", "train.py", *words.split())
        assert given.pop() == arguments
        done = command("submit", *options, "train.py", *words.split())
        (program,) = re.findall(r"^program=\((.*)\)$", done.stdout, re.MULTILINE)
        assert program.endswith(" ".join([str(tmp_path / "train.py"), *arguments])), program
    assert given == []


def test_a_script_that_is_not_there_is_told_in_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, found in (("missing.py", "there is no file"), ("folder", "is a directory")):
        done = shoal("run", "-n", "2", name, folder=tmp_path)
        lines = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, ""), name
        assert [line.split(":")[0] for line in lines] == ["given", "found", "fix"], name
        assert lines[0] == f"given: {name}"
        assert found in lines[1], name
        assert str(tmp_path / name) in lines[1]


def test_a_port_in_use(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match="in use") as caught:
            local.run(script, processes=1, port=port)
    assert caught.value.given == f"--port {port}"


def test_a_directory_for_temporary_files_that_sockets_can_not_name(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(LaunchError, match="allow 75") as caught:
        local.run(script, processes=1)
    assert caught.value.fix == "TMPDIR=/tmp shoal run …"


def test_nothing_is_started_for_a_run_that_cannot_work(script: str) -> None:
    before = dict(os.environ)
    with pytest.raises(LaunchError):
        local.run(script, processes=0)
    assert dict(os.environ) == before


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] == {name!r}:
            raise {error}

sys.meta_path.insert(0, Blocked())
"""
NO_LIBRARY = "libcudnn.so.9: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("package", "error", "words", "found", "fix"),
    [
        ("typer", "ModuleNotFoundError(name, name=name)", "--help", "typer", "install 'typer>=0.15'"),
        ("rich", "ModuleNotFoundError(name, name=name)", "-h", "rich", "install 'rich>=13.7'"),
        ("psutil", "ModuleNotFoundError(name, name=name)", "run -n 1 SCRIPT", "psutil", "psutil>=5.9"),
        ("typer", "ImportError('no name x', name=name)", "--help", "no name x", "'typer>=0.15'"),
        ("torch", f"ImportError({NO_LIBRARY!r}, name=name)", "info", NO_LIBRARY, "--force-reinstall"),
        ("torch", "ModuleNotFoundError(name, name=name)", "run -n 1 SCRIPT", "torch", "'torch>=2.11'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_python_to_install_it_for(
    package: str, error: str, words: str, found: str, fix: str, script: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(name=package, error=error))
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words.replace("SCRIPT", script).split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    given, what, how = done.stderr.splitlines()
    assert given.startswith("given: shoal ")
    assert what.startswith(f"found: {sys.executable} can't import {package}, which Shoal needs: ")
    assert found in what
    assert how.startswith(f"fix:   {sys.executable} -m pip install")
    assert fix in how
