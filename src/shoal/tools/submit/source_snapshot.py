"""A copy of the source at submission, so that the job runs exactly that code."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from shoal.telemetry.events import path_of
from shoal.util.errors import LaunchError
from shoal.util.packages import packages
from shoal.util.safe_text import is_secret, masked

LARGEST = 10 << 20
"""Larger files, in bytes, are data: Shoal links to them and does not copy them."""
MOST = 5000
"""Largest number of files that are copied."""
ENTRIES, FOLDERS = 1000, 100
"""Without git, a folder of more entries is data, and code is searched in at most 100 folders of one."""

_SECRETS = (".env*", ".netrc", ".git-credentials", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*")
_CODE = (".py", ".pyi", ".ipynb", ".sh", ".md", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_SETTINGS = (".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".txt")
_PASSED_OVER = ("__pycache__", ".git", ".venv", "node_modules")


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files that belong to a script, relative to their root.

    `copied` are copied. `linked`, files or directories, are linked to: data, files that git ignores,
    and files whose names suggest secrets. `git` has the commit and whether there are changes.
    """

    root: Path
    script: Path
    copied: tuple[PurePath, ...]
    linked: tuple[PurePath, ...] = ()
    git: dict[str, Any] = field(default_factory=dict)
    diff: bytes = b""


def find_source(script: Path, *, without: Path) -> SourceFiles:
    """Return the files that belong to a script: its git checkout or its directory, except `without`,
    the run's.

    Raises LaunchError if there are too many files.
    """
    script = script.resolve()
    root = _checkout(script.parent)
    source = _from_folder(script, without) if root is None else _from_git(root, script, without)
    if len(source.copied) > MOST:
        raise LaunchError(
            given=f"the source of {script.name}: {source.root}",
            found=f"{len(source.copied):,} files; Shoal copies at most {MOST:,} for a job",
            fix="move the script to a separate directory, or `git init` there and ignore the rest; or "
            "use --no-copy, and do not change the source until the job has ended",
        )
    return source


def copy_source(source: SourceFiles, folder: Path) -> Path:
    """Copy the source to `folder`/source with a description, and return the script's path there.

    The description is in `git.json`, `changes.diff` and `packages.txt` of `folder`.
    """
    copy = folder / "source"
    for path in source.copied:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(source.root / path, copy / path)
        except FileNotFoundError:  # a temporary file of an editor or another job
            if path == source.script.relative_to(source.root) or (source.root / path).exists():
                raise
    for path in source.linked:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).symlink_to(source.root / path)
    if source.git:
        (folder / "git.json").write_text(json.dumps(masked(source.git), indent=2) + "\n")
        (folder / "changes.diff").write_bytes(source.diff)
    names = sorted(packages().items(), key=lambda item: item[0].lower())
    (folder / "packages.txt").write_text("".join(f"{name}=={version}\n" for name, version in names))
    return copy / source.script.relative_to(source.root)


def import_paths(root: Path, copy: Path, given: Sequence[str]) -> tuple[str, ...]:
    """Return the paths inside of `root` on which Python imports, in the copy, so that imports find the
    copy.

    These are entries of PYTHONPATH, which are `given`, and those of editable installations.
    """
    found = []
    for entry in (*given, *sys.path):
        path = Path(entry).absolute()
        inside = path.is_relative_to(root) and not path.is_relative_to(Path(sys.prefix).absolute())
        if entry and inside and path.is_dir():
            found.append(str(copy / path.relative_to(root)))
    return tuple(dict.fromkeys(found))


def _from_git(root: Path, script: Path, without: Path) -> SourceFiles:
    def listed(*options: str) -> list[PurePath]:
        names = _git(root, "ls-files", "-z", *options).split(b"\0")
        return [PurePath(os.fsdecode(name)) for name in names if name]

    untracked = _outside_of_runs(root, listed("--others", "--exclude-standard"))
    files = [*listed("--cached", "--recurse-submodules"), *untracked]
    ignored = listed("--others", "--ignored", "--exclude-standard", "--directory")
    kept, linked = _sorted(root, files, without)
    linked += [path for path in ignored if _may_link(root / path, without)]
    own = script.relative_to(root)
    if own not in kept:  # the script is copied even if git ignores it
        kept.append(own)
        linked = [each for path in linked for each in _around(root, path, own, without)]
    names = [f":(exclude,literal){path}" for path in files if _is_secret(path)]
    known = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", needed=False)
    commit = known.decode().strip()
    diff = _git(root, "diff", "HEAD", "--binary", "--", ".", *names) if commit else b""
    return SourceFiles(
        root=root,
        script=script,
        copied=tuple(kept),
        linked=tuple(linked),
        git={
            "commit": commit,
            "branch": _git(root, "branch", "--show-current").decode(errors="replace").strip(),
            "remote": _git(root, "remote", "get-url", "origin", needed=False)
            .decode(errors="replace")
            .strip(),
            "changed": bool(diff),
            "untracked": [str(path) for path in untracked],
        },
        diff=diff,
    )


def _from_folder(script: Path, without: Path) -> SourceFiles:
    root = script.parent
    files: list[PurePath] = [script.relative_to(root)]
    data: list[PurePath] = []
    for path, is_code in _walk(root, without):
        if path != script:
            (files if is_code else data).append(path.relative_to(root))
        if len(files) > MOST:
            break
    kept, linked = _sorted(root, files, without)
    linked += [path for path in data if _may_link(root / path, without)]
    return SourceFiles(root=root, script=script, copied=tuple(kept), linked=tuple(linked))


def _around(root: Path, path: PurePath, own: PurePath, without: Path) -> Iterator[PurePath]:
    """Yield the links that replace `path`, which may be or contain the script: to everything else in
    it.
    """
    if not own.is_relative_to(path):
        yield path
    elif own != path:
        for entry in sorted((root / path).iterdir()):
            if _may_link(entry, without):
                yield from _around(root, entry.relative_to(root), own, without)


def _outside_of_runs(root: Path, files: list[PurePath]) -> list[PurePath]:
    """Return the files outside of run directories, which have checkpoints and copies of the source."""
    known: dict[PurePath, bool] = {}

    def in_run(folder: PurePath) -> bool:
        if folder not in known:
            known[folder] = _is_run(root / folder) or (folder.parts != () and in_run(folder.parent))
        return known[folder]

    return [path for path in files if not in_run(path.parent)]


def _is_run(folder: Path) -> bool:
    """Return whether a run, or a study of `shoal bench`, has written this directory."""
    marks = (path_of(folder, 0), folder / "study.json")
    return (folder / "jobs/1").is_dir() or any(mark.is_file() for mark in marks)


def _walk(folder: Path, without: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the content of a directory, each path with whether it is source: files, and directories
    without any.
    """
    for entry in sorted(folder.iterdir()):
        if _is_passed_over(entry.name) or entry == without:
            continue
        if not entry.is_dir() or entry.is_symlink():
            yield entry, entry.suffix in (*_CODE, *_SETTINGS)
        elif _is_source(entry, without):
            yield from _walk(entry, without)
        elif not _is_run(entry):
            yield entry, False


def _is_source(folder: Path, without: Path) -> bool:
    """Return whether a directory has code at some depth, or only code and settings.

    The search is breadth first and ends early, since large directories are data, and may be very large.
    """
    folders = deque([folder])
    for _ in range(FOLDERS):
        if not folders:
            return False
        entries = _few_entries(folders.popleft(), without)
        files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
        if any(file.name.endswith(".py") for file in files) or _are_small_texts(files):
            return True
        inside = (Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        folders.extend(sorted(inside))
    return False


def _few_entries(folder: Path, without: Path) -> list[os.DirEntry[str]]:
    """Return the content of a directory; [] if it is too large, a run, or a Python environment."""
    is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()
    if is_environment or folder == without or _is_run(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            found = list(islice(entries, ENTRIES + 1))
    except OSError:  # it is not readable
        return []
    if len(found) > ENTRIES:
        return []
    return [entry for entry in found if not _is_passed_over(entry.name)]


def _are_small_texts(files: Sequence[os.DirEntry[str]]) -> bool:
    if not files or not all(file.name.endswith((*_CODE, *_SETTINGS)) for file in files):
        return False
    return sum(file.stat(follow_symlinks=False).st_size for file in files) <= LARGEST


def _is_passed_over(name: str) -> bool:
    """Return whether it is a cache or environment of a tool, which is neither copied nor linked."""
    return name in _PASSED_OVER or name.startswith(".")


def _sorted(root: Path, files: list[PurePath], without: Path) -> tuple[list[PurePath], list[PurePath]]:
    """Return the files to copy and the files to link to."""
    kept: list[PurePath] = []
    linked: list[PurePath] = []
    for path in dict.fromkeys(files):
        whole = root / path
        if whole.is_relative_to(without) or not whole.exists():
            continue
        small = whole.is_file() and whole.stat().st_size <= LARGEST and os.access(whole, os.R_OK)
        (kept if small and not _is_secret(path) else linked).append(path)
    return kept, linked


def _may_link(path: Path, without: Path) -> bool:
    if _is_passed_over(path.name):
        return False
    return path.exists() and not without.is_relative_to(path) and not path.is_relative_to(without)


def _is_secret(path: PurePath) -> bool:
    if any(fnmatch.fnmatch(path.name, pattern) for pattern in _SECRETS):
        return True
    return path.suffix not in _CODE and is_secret(re.sub(r"\W", "_", path.stem))


def _checkout(folder: Path) -> Path | None:
    """Return the root of the git checkout of a directory; None if there is none."""
    found = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel", needed=False)).rstrip("\n")
    return Path(found).resolve() if found else None


def _git(folder: Path, *arguments: str, needed: bool = True) -> bytes:
    """Return the output of a git command; empty without git, or if it fails and is not `needed`.

    Raises LaunchError if it fails and is needed, or if git does not trust the owner of the checkout.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return b""
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode and (needed or "dubious ownership" in said):
        raise LaunchError(
            given=f"git {' '.join(arguments[:2])} in {folder}",
            found=said or f"exit code {done.returncode}",
            fix="repair the checkout, or use --no-copy and do not change it until the job has ended",
        )
    return b"" if done.returncode else done.stdout
