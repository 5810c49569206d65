"""`shoal run -m package.module` runs a module as `python -m` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launcher.entry_point import Module, find_module
from shoal.util.errors import LaunchError

MODULE = """
import json, multiprocessing, sys
from .neighbour import NAME

class Mine:
    pass

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [3])
    seen = {
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "package": __package__,
        "spec": __spec__.name,
        "main": sys.modules["__main__"].Mine is Mine,
        "neighbour": NAME,
        "squares": squares,
    }
    print(json.dumps(seen))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory with the package `jobs`, which has a module and a `__main__`."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "__init__.py").write_text("")
    (jobs / "neighbour.py").write_text("NAME = __name__\n")
    (jobs / "train.py").write_text(MODULE)
    # Python's own spawn does not find the functions of a `__main__.py`.
    (jobs / "__main__.py").write_text(MODULE.replace('"spawn"', '"fork"'))
    (jobs / "broken.py").write_text("def fail():\n    raise ValueError('boom')\nfail()\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", ["jobs.train", pytest.param("jobs", marks=pytest.mark.long)])
def test_a_module_sees_what_python_would_show_it(package: Path, name: str) -> None:
    words = (name, "--lr", "0.1", "-m", "x y")
    plain = python(package, "-m", *words)
    done = python(package, "-m", "shoal", "run", "-n", "1", "-m", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(plain.stdout)["squares"] == [9]
    assert json.loads(done.stdout) == json.loads(plain.stdout)


@pytest.mark.full
@pytest.mark.processes
def test_the_report_of_a_module_begins_in_the_module(package: Path) -> None:
    done = python(package, "-m", "shoal", "run", "-n", "1", "-m", "jobs.broken")
    path = package / "jobs" / "broken.py"
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[:2] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in <module>',
    ]
    assert lines[-2] == "ValueError: boom"
    assert f"{path}:2" in lines[-1]


def test_a_module_that_is_not_there(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    for name, found in (
        ("jobs.evaluate", "there is no module jobs.evaluate"),
        ("nothing.at.all", "there is no module nothing"),
        ("jobs.train.py", "there is no module jobs.train.py"),
        ("folder", "the package folder has no __main__.py"),
        ("jobs/train.py", "not the name of a module"),
        (".train", "not the name of a module"),
    ):
        with pytest.raises(LaunchError) as raised:
            find_module(name, safe_path=False)
        assert raised.value.given == f"-m {name}"
        assert found in raised.value.found
        assert name != "jobs/train.py" or "-m jobs.train" in raised.value.fix


def test_looking_for_a_module_imports_none(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    (package / "jobs" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert find_module("jobs.train", safe_path=False) == str(package / "jobs" / "train.py")
    assert find_module("jobs", safe_path=False) == str(package / "jobs" / "__main__.py")
    assert "jobs" not in sys.modules
    with pytest.raises(LaunchError):
        find_module("jobs.train", safe_path=True)
    assert Module(module="jobs.train", args=("x y",)).name == "-m jobs.train 'x y'"
