"""The copy of the source: what is in it, what is linked to, what is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.tools.submit import source_snapshot as module
from shoal.tools.submit.source_snapshot import copy_source, find_source, import_paths
from shoal.util.errors import LaunchError
from shoal.util.packages import packages

ODD = "it's a\n$(touch broken) file.py"


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with all kinds of files, of which some changed after the commit."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "main", "project")
    (root / "scripts/train.py").write_text("import helper\n")
    (root / "helper.py").write_text("before = 1\n")
    (root / "gone.py").write_text("")
    (root / ODD).write_text("")
    (root / "settings.py").write_text("")
    (root / ".gitignore").write_text("data/\nruns/\n*.so\n__pycache__/\n")
    (root / ".env").write_text("TOKEN=hunter2\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    git(root, "remote", "add", "origin", "https://me:hunter2@example.org/project.git")
    (root / "helper.py").write_text("after = 2\n")
    (root / ".env").write_text("TOKEN=hunter3\n")
    (root / "gone.py").unlink()
    (root / "new.py").write_text("new = 1\n")
    (root / "api_key.txt").write_text("hunter4\n")
    (root / "data").mkdir()
    (root / "data/numbers").write_text("1 2 3\n")
    (root / "fast.so").write_bytes(b"\0")
    (root / "__pycache__").mkdir()
    (root / "__pycache__/x.pyc").write_bytes(b"\0")
    (root / "runs/a").mkdir(parents=True)
    return root


def copied(root: Path, script: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return copy_source(find_source(root / script, without=root / "runs/a"), folder)


def test_it_is_the_source_as_it_is_now(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And links to what git ignores."""
    monkeypatch.setattr(module, "LARGEST", 100)
    (checkout / "large.bin").write_bytes(b"0" * 101)
    folder = checkout / "runs/a/jobs/1"
    script = copied(checkout, "scripts/train.py", folder)
    copy = folder / "source"
    assert script == copy / "scripts/train.py"
    for name in ("data", "fast.so", "large.bin"):
        assert (copy / name).is_symlink()
        assert (copy / name).resolve() == checkout / name
    assert (copy / "data/numbers").read_text() == "1 2 3\n"
    (checkout / "helper.py").write_text("later = 3\n")
    assert (copy / "helper.py").read_text() == "after = 2\n"
    assert (copy / "new.py").read_text() == "new = 1\n"
    assert (copy / ODD).exists()
    assert not (copy / "gone.py").exists()
    assert not (copy / "__pycache__").exists()
    assert not (copy / "runs").exists()


def test_what_git_says_is_kept_without_a_secret(checkout: Path) -> None:
    folder = checkout / "runs/a/jobs/1"
    found = find_source(checkout / "scripts/train.py", without=checkout / "runs/a")
    assert not {".env", "api_key.txt"} & set(map(str, found.copied))
    copied(checkout, "scripts/train.py", folder)
    assert (folder / "source/.env").resolve() == checkout / ".env"  # the script may want it
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(b"hunter" in path.read_bytes() for path in files)
    said = json.loads((folder / "git.json").read_text())
    assert len(said["commit"]) == 40
    assert (said["branch"], said["changed"]) == ("main", True)
    assert said["remote"] == "https://***@example.org/project.git"
    assert "new.py" in said["untracked"]
    changes = (folder / "changes.diff").read_text()
    for line in ("-before = 1", "+after = 2", "deleted file"):
        assert line in changes
    listed = (folder / "packages.txt").read_text().splitlines()
    assert dict(line.split("==") for line in listed) == packages()
    assert any(line.lower().startswith("jinja2==") for line in listed)


def test_what_runs_have_written_is_no_source(checkout: Path) -> None:
    """Neither checkpoints nor the copies of earlier jobs, which would grow with each."""
    (checkout / ".gitignore").write_text("data/\n")
    for name in ("out/b/events/rank-0.jsonl", "out/b/checkpoints/step-1/x", "out/c/jobs/1/source/y.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    (checkout / "out/kept.py").write_text("")
    (checkout / "linked").symlink_to(checkout / "data")
    copied(checkout, "scripts/train.py", checkout / "runs/a/jobs/1")
    copy = checkout / "runs/a/jobs/1/source"
    assert [str(path.relative_to(copy)) for path in (copy / "out").rglob("*")] == ["out/kept.py"]
    assert (copy / "linked/numbers").exists()
    copied(checkout, "scripts/train.py", checkout / "runs/a/jobs/2")
    assert not (checkout / "runs/a/jobs/2/source/runs").exists()


def test_a_script_that_git_ignores_is_copied_and_what_it_imports_linked_to(checkout: Path) -> None:
    for name in ("data/train.py", "data/helper.py", "data/deep/script.py", "data/deep/other.py"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("x = 1\n")
    script = copied(checkout, "data/deep/script.py", checkout / "runs/a/jobs/1")
    assert script.read_text() == "x = 1\n"
    copy = checkout / "runs/a/jobs/1/source/data"
    links = {str(path.relative_to(copy)): path.is_symlink() for path in copy.rglob("*")}
    expected = {"deep/other.py": True, "helper.py": True, "numbers": True, "train.py": True}
    assert links == {"deep": False, "deep/script.py": False, **expected}
    assert not copy.is_symlink()


def test_a_checkout_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("")
    assert copied(tmp_path, "train.py", tmp_path / "runs/a/jobs/1").exists()


@pytest.mark.full
def test_a_checkout_of_somebody_else_is_not_taken_for_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git says so, and whose it is; without git half of the project would not be copied."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(LaunchError, match="dubious ownership") as error:
        find_source(checkout / "scripts/train.py", without=checkout / "runs/a")
    assert "safe.directory" in error.value.found


@pytest.mark.full
def test_files_that_go_or_can_not_be_read(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of editors, files of colleagues: no reason not to submit."""
    found = find_source(checkout / "scripts/train.py", without=checkout / "runs/a")
    (checkout / "new.py").unlink()
    script = copy_source(found, checkout / "runs/a")
    assert script.exists()
    assert not (script.parent.parent / "new.py").exists()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path.name != "helper.py" and access(path, mode)
    )
    found = find_source(checkout / "scripts/train.py", without=checkout / "runs/a")
    assert "helper.py" in map(str, found.linked)
    (checkout / "scripts/train.py").unlink()
    with pytest.raises(FileNotFoundError):
        copy_source(found, checkout / "runs/a/jobs/2")


def test_without_git_it_is_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name in ("train.py", "package/inner.py", "package/table.csv", "data/numbers", ".hidden/x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "runs/a").mkdir(parents=True)
    copied(tmp_path, "train.py", tmp_path / "runs/a/jobs/1")
    copy = tmp_path / "runs/a/jobs/1/source"
    links = {str(path.relative_to(copy)): path.is_symlink() for path in copy.rglob("*")}
    assert links == {
        "train.py": False,
        "package": False,
        "package/inner.py": False,
        "package/table.csv": True,
        "data": True,
    }
    assert not (tmp_path / "runs/a/jobs/1/git.json").exists()
    monkeypatch.setattr(module, "MOST", 1)
    with pytest.raises(LaunchError, match="copies at most 1"):
        find_source(tmp_path / "train.py", without=tmp_path / "runs/a")


def test_without_git_settings_and_code_at_any_depth_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever else is there is one link, large as it may be."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(module, "ENTRIES", 8)
    monkeypatch.setattr(module, "LARGEST", 100)
    copies = {"train.py", "config.yaml", "configs/a.yaml", "src/pkg/__init__.py", "csrc/deep/x.cu"}
    links = {"large.json", "images", "texts", "venv", "src/pictures", "secrets.yaml"}
    many = [f"{folder}/{number}.png" for folder in ("images", "src/pictures") for number in range(9)]
    inside = ("images/download.py", "texts/a.txt", "texts/b.txt", "venv/pyvenv.cfg", "venv/lib/x.py")
    for name in (*copies, *many, *inside, "large.json", "secrets.yaml", "runs/b/jobs/1/source/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "large.json").write_text("0" * 101)
    for name in ("texts/a.txt", "texts/b.txt"):
        (tmp_path / name).write_text("0" * 60)
    found = find_source(tmp_path / "train.py", without=tmp_path / "runs/a")
    assert (set(map(str, found.copied)), set(map(str, found.linked))) == (copies, links)
    copied(tmp_path, "train.py", tmp_path / "runs/a/jobs/1")
    for name in copies:
        (tmp_path / name).write_text("changed afterwards")
        assert (tmp_path / "runs/a/jobs/1/source" / name).read_text() == ""


def test_imports_from_the_checkout_find_the_copy(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH, and what an editable installation adds to where Python looks."""
    copy = tmp_path / "copy"
    monkeypatch.setattr(
        sys, "path", [str(checkout), str(tmp_path), str(checkout / "scripts"), sys.prefix]
    )
    assert import_paths(checkout, copy, [str(checkout), "/usr"]) == (str(copy), str(copy / "scripts"))
