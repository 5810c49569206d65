"""What Shoal starts imports nothing from the current directory; a script imports from its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.util.python import code_command, module_command, script_command, shoal_command

# Of Python itself, imported early and late, of packages, and of the script below.
PLANTED = (
    *("ast", "encodings", "json", "multiprocessing", "pickle", "random", "runpy", "socket", "typing"),
    *("model", "numpy", "rich", "shoal", "sitecustomize", "torch", "typer"),
)

TRAINING = """
import json, multiprocessing, sys
import torch
from torch.utils.data import DataLoader
import model

class Squares:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import model
        return model.square(index)

if __name__ == "__main__":
    loaded = [int(x) for x in DataLoader(Squares(), num_workers=1, multiprocessing_context=sys.argv[1])]
    print(json.dumps([model.__file__, loaded]))
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with files of these names, each of which leaves a mark if it is imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in PLANTED:
        text = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise SystemExit({name!r})"
        (folder / f"{name}.py").write_text(text)
    return folder


def run(command: list[str], folder: Path) -> str:
    """What a command prints in this directory, in which nothing was imported."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder.parent / "imported").exists(), (folder.parent / "imported").read_text()
    return done.stdout


@pytest.mark.processes
def test_the_current_directory_hides_no_module(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import sys, typing, socket, beside; print(beside.x, *sys.argv[1:])"
    )
    (tmp_path / "beside.py").write_text("x = 5")
    assert (
        run(code_command("import socket, random, sys; print(*sys.argv)", "a b"), hostile) == "-c a b\n"
    )
    assert "platform" in run(module_command("sysconfig"), hostile).lower()
    assert run(script_command(str(tmp_path / "own.py"), "a b"), hostile) == "5 a b\n"
    assert run(shoal_command("--version"), hostile).startswith("shoal ")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "method"),
    [(False, "fork"), *(pytest.param(way, "spawn", marks=pytest.mark.full) for way in (False, True))],
)
def test_a_script_and_the_processes_that_it_starts_keep_its_directory(
    module: bool, method: str, hostile: Path, tmp_path: Path
) -> None:
    home = tmp_path / "project"
    home.mkdir()
    (home / "train.py").write_text(TRAINING)
    (home / "model.py").write_text("def square(x):\n    return x * x\n")
    # A module is searched from the current directory on, as by `python -m`.
    where, words = (home, ["-m", "train"]) if module else (hostile, [str(home / "train.py")])
    said = run(shoal_command("run", "-n", "1", *words, method), where).splitlines()
    assert [json.loads(line) for line in said] == [[str(home / "model.py"), [0, 1]]]


@pytest.mark.full
@pytest.mark.processes
def test_a_launched_function_has_its_callers_path_and_the_launcher_has_not(
    hostile: Path, tmp_path: Path
) -> None:
    script = f"""
import os, sys
import model
import shoal
from shoal.launcher import function, local  # what the caller has imported, it has

def work(number):
    import beside
    return beside.x * number, sys.path

if __name__ == "__main__":
    os.chdir({str(hostile)!r})
    sys.path[:0] = ["", {str(tmp_path)!r}]
    assert shoal.launch(work, 2, processes=2) == [(10, sys.path)] * 2
"""
    home = tmp_path / "project"
    home.mkdir()
    (tmp_path / "beside.py").write_text("x = 5")
    (home / "model.py").write_text("")
    (home / "call.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(home / "call.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "plan --model llama-7b -n 8 --training steps=10,start=auto",
        "bench scaling dense:width=8,layers=2 -n 1 --steps 2 --warmup 1 --rounds 1",
        "submit --time 1:00 --dry-run --no-copy ../own.py --python",
    ],
)
def test_commands_that_start_python(words: str, hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import shoal")
    given = [*words.split(), *([sys.executable] if words.endswith("--python") else [])]
    run(shoal_command(*given), hostile)
