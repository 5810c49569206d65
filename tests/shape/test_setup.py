"""The set-up scripts: what they take, what they refuse, and what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import rules


def find_python(repository: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(repository / "scripts" / "find-python")],
        env={"PATH": str(folder), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_shim_that_fails_is_passed_over(repository: Path, tmp_path: Path) -> None:
    program(tmp_path / "python3", "exit 127")
    program(tmp_path / "python3.12", f'exec "{sys.executable}" "$@"')
    done = find_python(repository, tmp_path)
    assert done.returncode == 0
    assert done.stdout.strip() == sys.executable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("printf 3.9; exit 3", "python3: Python 3.9, too old"),
        ("printf 3.11; exit 4", "apt install python3.11-venv"),
        ("exit 127", "python3: does not run"),
    ],
)
def test_it_says_what_was_tried(repository: Path, tmp_path: Path, text: str, message: str) -> None:
    program(tmp_path / "python3", text)
    done = find_python(repository, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "python3.11: not found" in done.stderr


def test_a_named_interpreter_has_no_substitute(repository: Path, tmp_path: Path) -> None:
    program(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    done = find_python(repository, tmp_path, PYTHON="elsewhere")
    assert done.returncode == 1
    assert "elsewhere: not found" in done.stderr
    assert "python3:" not in done.stderr


def skips(repository: Path, folder: Path, reason: str, *, ci: bool) -> int:
    """The exit code of a run whose one test skips for `reason`."""
    shutil.copy(repository / "tests" / "conftest.py", folder)
    (folder / "test_skip.py").write_text(
        f"import pytest\ndef test_skip():\n    pytest.skip({reason!r})\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env=env | ({"CI": "true"} if ci else {}),
        cwd=folder,
        capture_output=True,
        check=False,
    )
    return done.returncode


@pytest.mark.full
def test_skips_fail_in_ci_only(repository: Path, tmp_path: Path) -> None:
    assert skips(repository, tmp_path, "gcc is missing", ci=True) == pytest.ExitCode.TESTS_FAILED
    assert skips(repository, tmp_path, "gcc is missing", ci=False) == pytest.ExitCode.OK
    assert skips(repository, tmp_path, "needs CUDA", ci=True) == pytest.ExitCode.OK


@pytest.mark.full
def test_a_module_that_skips_fails_in_ci(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_import.py").write_text("import pytest\npytest.importorskip('no_such')\n")
    assert skips(repository, tmp_path, "needs CUDA", ci=False) == pytest.ExitCode.OK
    assert skips(repository, tmp_path, "needs CUDA", ci=True) == pytest.ExitCode.INTERRUPTED


@pytest.mark.full
def test_ci_runs_the_first_full_row_of_a_test(repository: Path, tmp_path: Path) -> None:
    shutil.copy(repository / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_rows.py").write_text(
        "import pytest\n"
        "full = lambda row, **options: pytest.param(row, marks=pytest.mark.full(**options))\n"
        "@pytest.mark.parametrize('row', ['quick', full('first'), full('second'), full('third')])\n"
        "def test_table(row): ...\n"
        "@pytest.mark.parametrize('row', [full(0, rows='all'), full(1, rows='all')])\n"
        "def test_whole(row): ...\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "full and not long", "-vv", "--collect-only"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"<Function (test_\S+)>", done.stdout)
    assert found == ["test_table[first]", "test_whole[0]", "test_whole[1]"]


@pytest.mark.system
@pytest.mark.long  # CI is a fresh checkout itself
@pytest.mark.timeout(900)
def test_a_fresh_checkout_sets_itself_up(repository: Path, tmp_path: Path) -> None:
    """In a folder with a space in its name; mended when half made; done the second time."""
    checkout = tmp_path / "a checkout"
    for path in rules.text_files(repository):
        copy = checkout / path.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)

    # What an interrupted installation leaves: an environment without its stamp.
    half_made = checkout / ".venv" / "bin" / "python"
    half_made.parent.mkdir(parents=True)
    program(half_made, "exit 1")

    def make() -> str:
        return subprocess.run(
            ["make", "venv"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout

    assert "Making .venv" in make()
    assert (checkout / ".venv" / "bin" / "shoal").exists()
    assert make() == ""


def test_no_two_files_of_tests_have_one_name(repository: Path) -> None:
    """Pytest imports them by their names alone."""
    names = sorted(path.name for path in (repository / "tests").rglob("test_*.py"))
    assert names == sorted(set(names))
