"""A command line that is not valid: every problem in one error, in the style of all errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import refused, shoal


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, train.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('this must not be started')\n")
    return tmp_path


def test_all_problems_are_told_at_once(folder: Path) -> None:
    for start in (["-m", "shoal"], ["-c", "from shoal.cli.main import main; main()"]):
        words = ["run", "--nproc", "0", "--bogus", "x.py-that-does-not-exist"]
        done = subprocess.run(
            [sys.executable, *start, *words], capture_output=True, text=True, timeout=100, check=False
        )
        assert (done.returncode, done.stdout) == (2, ""), start
        assert done.stderr.splitlines() == [
            "given: shoal run --nproc 0 --bogus x.py-that-does-not-exist",
            "found: --nproc: no such option; did you mean --nproc-per-node?",
            "       --bogus: no such option",
            "       --nproc-per-node 0: 0 is less than 1",
            f"       x.py-that-does-not-exist: there is no file {folder / 'x.py-that-does-not-exist'}",
            "fix:   --nproc-per-node",
            "       options of the script follow its name: shoal run -n 4 train.py --lr 0.1; "
            "shoal run --help lists the options",
            "       --nproc-per-node 1 or more: Number of processes on this node; required "
            "unless the environment names the job's nodes.",
            "       give the path of a Python file: shoal run -n 2 script.py",
        ]


ONE = [
    ("run train.py", "shoal run train.py", "number of processes is missing", "shoal run -n 2 train.py"),
    ("run -n 0 train.py", "-n 0", "0 is less than 1", "-n 1 or more"),
    ("run --nproc_per_node 0 train.py", "--nproc-per-node 0", "less than 1", "1 or more"),
    ("run -n 2", "shoal run", "SCRIPT is missing", "shoal run -n 4 train.py"),
    ("run -n 2 --port 70000 train.py", "--port 70000", "greater than 65535", "65535 or less"),
    ("run -n 2 --lr 0.1 train.py", "--lr", "no such option", "options of the script follow"),
    ("run -n 2 --logs=l --lr=1 train.py", "--lr", "no such option", "options of the script follow"),
    ("run -n 2 --grace x train.py", "--grace x", "x is not a number", "--grace SECONDS"),
    ("run -n 2 --module=yes train.py", "--module=yes", "takes no value", "--module"),
    ("run -n 2 -q train.py", "-q", "no such option", "shoal run --help"),
    ("run -n 2 python train.py", "python", "no file", "leave python out: shoal run -n 2 script.py"),
    ("run -n 2 -m train.py", "-m train.py", "no module train.py", "-m train"),
    ("submit train.py", "shoal submit train.py", "no time limit", "--time 20:00:00 train.py"),
    ("submit --time x train.py", "--time x", "not a duration", "--time 20:00:00"),
    ("report --textt runs/a", "--textt", "did you mean --text?", "--text"),
    ("report", "shoal report", "RUN is missing", "shoal report runs/a"),
    ("report -o", "-o", "needs a value", "-o DIR"),
    ("info all", "all", "does not take", "shoal info"),
    ("watch --every 0 runs/a", "--every 0", "0 is less than 0.1", "--every 0.1 or more"),
    ("fly", "shoal fly", "no such command", "shoal --help"),
    ("rnu -n 2 train.py", "shoal rnu", "no such command", "shoal run -n 2 train.py"),
    ("train.py", "shoal train.py", "no such command", "shoal run -n 2 train.py"),
    ("checkpoint lss runs/a", "shoal checkpoint lss", "no such command", "shoal checkpoint ls runs/a"),
    ("--verbose run train.py", "--verbose", "no such option", "shoal --help"),
]


def test_a_single_problem() -> None:
    for words, given, found, fix in ONE:
        error = refused(*words.split())
        if words != "report -o":
            assert error.given == given, words
        assert found in error.found, words
        assert fix in error.fix, words


def test_each_of_several_problems_has_a_line() -> None:
    for words, problems in (
        ("run", ["SCRIPT is missing", "the number of processes is missing"]),
        ("run -n", ["-n: the option needs a value", "SCRIPT is missing"]),
        ("run -n x --restarts -1 gone.py", ["x is not an integer", "less than 0", "no file"]),
        (
            "run --nodes 4:2 --rendezvous node01 --port 99999 gone.py",
            ["4, is above", "not a host and a port", "99999", "no file", "number of processes"],
        ),
        ("submit --nodes 0 gone.py", ["0 is less than 1", "there is no file", "no time limit"]),
        ("report --textt a b", ["did you mean --text?", "b: an argument"]),
        ("bench scaling --limit 0 --steps x", ["less than 1", "not an integer", "MODEL is missing"]),
    ):
        error = refused(*words.split())
        assert error.given == f"shoal {words}"
        lines = error.found.split("\n")
        assert len(lines) == len(problems), words
        for problem in problems:
            assert problem in error.found, words


def test_help_comes_before_problems() -> None:
    for words in ("run --bogus --help", "run -n 0 -h", "checkpoint -h"):
        done = shoal(*words.split())
        assert done.exit_code == 0, words
        assert "Usage" in done.stdout, words
    # A group alone shows its help.
    for words in ("", "checkpoint"):
        assert "Usage: shoal" in shoal(*words.split()).output
