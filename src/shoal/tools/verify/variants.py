"""Runs a script in its variants, each in a separate copy of the working directory."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.launcher.entry_point import find_script
from shoal.tools.verify.observations import ObserverOptions, RunRecord, read_run
from shoal.tools.verify.run_servers import RunServers, observed_script
from shoal.util.errors import LaunchError

LARGE = 64 << 20
"""Bytes of a file that is linked instead of copied."""
MOST_RANKS = 1024
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "venv")
LINES = 25


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The script, the variants to run, and where the runs and their records are kept.

    `steps` is the number of optimizer steps after which a run ends, `kills` the number of runs that are
    killed, `limit` the seconds that one run may take. A run that is started again after a kill gets
    `restart_args` in addition to `args`.
    """

    script: str
    args: tuple[str, ...] = ()
    restart_args: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)
    kills: int = 1
    steps: int = 40
    limit: float = 600.0
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run: its name, its ranks, and what differs from the first run.

    A run with `trace_at` records the operations of this step and ends after it. With `micro_batches`,
    each shoal.Loader has that many times its micro-batches; with `losses`, the loss of each step is
    recorded.
    """

    name: str
    size: int
    kill_at: int | None = None
    hash_seed: int = 1
    reverse_files: bool = False
    trace_at: int | None = None
    micro_batches: int = 1
    losses: bool = False


def check_request(request: VerifyRequest) -> None:
    """Raise LaunchError if the script is not in the current directory or a number is not valid."""
    command = f"shoal verify {request.script}"
    find_script(request.script, "shoal verify train.py")
    folder, name = os.path.split(request.script)
    inside = f"cd {shlex.quote(folder)} && shoal verify {shlex.quote(name)}"
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise LaunchError(
            given=command,
            found=f"the script is outside of the current directory {Path.cwd()}, which is copied",
            fix=f"change to its directory: {inside}",
        )
    if not request.ranks or min(request.ranks) < 1 or max(request.ranks) > MOST_RANKS:
        raise LaunchError(
            given=f"--ranks {','.join(map(str, request.ranks))}",
            found=f"a number of ranks is 1 to {MOST_RANKS:,}",
            fix="shoal verify --ranks 1,2 train.py",
        )


def run_variant(
    request: VerifyRequest, variant: Variant, servers: RunServers, *, home: Path | None = None
) -> RunRecord:
    """Run one variant and return its records.

    `home` is the working directory; by default a new copy of the current one.
    """
    if home is None:
        home = request.scratch / variant.name / "home"
        copy_directory(Path.cwd(), home)
    folder = home.parent / f"records-{len(list(home.parent.glob('records-*')))}"
    folder.mkdir()
    observer = ObserverOptions(
        folder=str(folder),
        root=str(home),
        stop_after=variant.trace_at or request.steps,
        trace_at=variant.trace_at,
        kill_at=variant.kill_at,
        micro_batches=variant.micro_batches,
        losses=variant.losses,
    )
    script = observed_script(
        request.script,
        request.args,
        observer,
        processes=variant.size,
        reverse_files=variant.reverse_files,
    )
    code = servers.run(script, variant.size, hash_seed=variant.hash_seed, limit=request.limit)
    return read_run(folder, name=variant.name, size=variant.size, code=code)


def run_killed(
    request: VerifyRequest, variant: Variant, servers: RunServers, *, restarts: Callable[[], None]
) -> RunRecord:
    """Run a variant until its kill, then again in the same directory; return the second's records.

    `trace_at` applies to the second run, before which `restarts` is called.
    """
    run_variant(request, replace(variant, trace_at=None), servers)
    restarts()
    home = request.scratch / variant.name / "home"
    again = replace(request, args=(*request.args, *request.restart_args))
    return run_variant(again, replace(variant, kill_at=None), servers, home=home)


def last_output(request: VerifyRequest, name: str) -> str:
    """Return the last lines that a variant printed."""
    files = sorted((request.scratch / name).glob("records-*/output.txt"))
    text = files[-1].read_text(encoding="utf-8", errors="replace") if files else ""
    return "\n".join(text.strip().splitlines()[-LINES:])


def copy_directory(source: Path, target: Path) -> None:
    """Copy the files of a working directory that are not hidden; large files become symbolic links.

    Files that vanish during the copy are left out. Raises LaunchError if another can't be copied.
    """
    try:
        shutil.copytree(source, target, ignore=_ignored, symlinks=True, copy_function=_copy)
    except shutil.Error as error:
        reasons = [f"{path}: {reason}" for path, _, reason in error.args[0] if os.path.lexists(path)]
        if reasons:
            raise LaunchError(
                given=f"shoal verify in {source}",
                found=reasons[0],
                fix="make its files readable, and leave space for the copies in TMPDIR",
            ) from None


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Return which entries of a directory are hidden, or neither files, links nor directories."""
    kinds = (os.path.isfile, os.path.islink, os.path.isdir)
    special = {name for name in names if not any(kind(os.path.join(folder, name)) for kind in kinds)}
    return SKIPPED(folder, names) | special


def _copy(source: str, target: str) -> None:
    if os.path.getsize(source) > LARGE:
        os.symlink(os.path.abspath(source), target)
    else:
        shutil.copy2(source, target)
