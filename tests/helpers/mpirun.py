"""Ranks that `mpirun` starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

PROGRAMS = ("mpirun.openmpi", "mpirun.mpich")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
DEBIAN = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)


def command(program: str, size: int, folder: Path, *more: str) -> list[str]:
    """What starts a script on so many ranks; `more` are variables.

    Debian's MPICH is given the name that mpi4py asks for.
    """
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program}")
    variables = [f"{name}={value}" for name, value in AS_ROOT.items()]
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in program else []
    if "mpich" in program and DEBIAN is not None:
        named = folder / "lib" / "libmpi.so.12"
        if not named.exists():
            named.parent.mkdir()
            named.symlink_to(DEBIAN)
        variables.append(f"LD_LIBRARY_PATH={named.parent}")
    return ["env", *variables, *more, path, *options, "-n", str(size), sys.executable]
