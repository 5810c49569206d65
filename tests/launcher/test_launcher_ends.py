"""Launchers do with signals and exit codes what the pages on preemption and exit codes say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.mpirun import AS_ROOT, PROGRAMS

pytestmark = [pytest.mark.system, pytest.mark.timeout(500)]

# For each launcher, the signals that reach ranks and the exit code after all have left with 75, for
# SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP; then the exit codes for ranks with 75 and 75, 75 and 1.
FORWARDED = [("USR1", 75), ("USR2", 75)]
SIGNALS = {
    "shoal": [("CONT TERM", 75), *FORWARDED, ("CONT TERM", 75)],
    "torchrun": [("TERM", 1), ("none", -10), ("none", -12), ("HUP", 1)],
    "mpirun.openmpi": [("CONT TERM", 1), *FORWARDED, ("CONT TERM", 1)],
    "mpirun.mpich": [("TERM", 75), ("USR1", 75), ("none", -12), ("none", -1)],
    "srun": [("none", 137), *FORWARDED, ("none", 137)],
}
ZERO = ("mpirun.mpich",)
"""MPICH 4.0 exits with 0 in about one of four runs in which all ranks have left with 75."""
CODES = {
    "shoal": (75, {1}),
    "torchrun": (1, {1}),
    "mpirun.openmpi": (75, {1, 75}),  # that of the rank that it sees first
    "mpirun.mpich": (75, {75}),
    "srun": (75, {75}),
}
BY_SCANCEL = ["CONT TERM", "USR1", "USR2", "HUP"]


def columns(table: list[dict[str, object]], launcher: str, *names: str) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in names) for row in table if row["launcher"] == launcher]


def check(printed: str, *launchers: str) -> dict[str, list[dict[str, object]]]:
    tables: dict[str, list[dict[str, object]]] = json.loads(printed.splitlines()[-1])
    for each in launchers:
        found = columns(tables["signals"], each, "reaches ranks as", "code if all leave with 75")
        if each in ZERO:
            found = [(heard, 75 if code == 0 else code) for heard, code in found]
        assert found == SIGNALS[each], each
        both, one, *_ = [code for (code,) in columns(tables["codes"], each, "code")]
        assert (both, one in CODES[each][1]) == (CODES[each][0], True), each
    return tables


def test_on_this_machine(repository: Path, tmp_path: Path) -> None:
    driver = str(repository / "benchmarks/launcher_ends.py")
    launchers = ["shoal", "torchrun", *PROGRAMS]
    command = [sys.executable, driver, "--launchers", *launchers, "--seconds", "10", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout, *launchers)


@pytest.mark.cluster
def test_on_slurm(repository: Path, cluster: Cluster, tmp_path: Path) -> None:
    driver = str(repository / "benchmarks/launcher_ends.py")
    command = [sys.executable, driver, "--launchers", "srun", "scancel", "--seconds", "20", "--json"]
    done = cluster.run(command, folder=tmp_path, variables={**AS_ROOT, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    tables = check(done.stdout, "srun")
    heard = [what for (what,) in columns(tables["signals"], "scancel", "reaches ranks as")]
    assert heard == BY_SCANCEL
