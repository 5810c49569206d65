"""Ranks under `mpirun`: a function of a module beside this one, called once on every rank."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Command, Ended

PROGRAMS = ("mpirun.openmpi", "mpirun.mpich")
DEBIAN = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)
SECONDS = 120
_TESTS = str(Path(__file__).parents[1])
_CALLED = f"import sys; sys.path.insert(0, {_TESTS!r}); from helpers.mpirun import main; main()"


def command(program: str, size: int, folder: Path) -> list[str]:
    """What starts a script on so many ranks; Debian's MPICH is given the name that mpi4py asks for."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program}")
    variables = ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in program else []
    if "mpich" in program and DEBIAN is not None:
        named = folder / "lib" / "libmpi.so.12"
        if not named.exists():
            named.parent.mkdir()
            named.symlink_to(DEBIAN)
        variables.append(f"LD_LIBRARY_PATH={named.parent}")
    return ["env", *variables, path, *options, "-n", str(size), sys.executable]


def run(program: str, size: int, script: str, folder: Path, *arguments: str) -> Ended:
    """What became of a script on so many ranks."""
    (folder / "script.py").write_text(script)
    started = Command([*command(program, size, folder), "script.py", *arguments], folder)
    try:
        return started.end(SECONDS)
    finally:
        started.clean_up()


def call(
    program: str, size: int, folder: Path, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """What `function(*arguments)` returned on each rank."""
    asked = folder / "asked"
    asked.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
    started = Command([*command(program, size, folder), "-c", _CALLED, str(folder)], folder)
    try:
        ended = started.end(SECONDS)
    finally:
        started.clean_up()
    assert ended.code == 0, ended.out + ended.err
    return [pickle.loads((folder / f"returned{rank}").read_bytes()) for rank in range(size)]


def main() -> None:
    folder = Path(sys.argv[1])
    module, name, arguments = pickle.loads((folder / "asked").read_bytes())
    returned = getattr(importlib.import_module(module), name)(*arguments)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    (folder / f"returned{rank}").write_bytes(pickle.dumps(returned))
