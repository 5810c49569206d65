"""Facts of ranks for the checks of `shoal doctor`, and its commands outside of any launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from shoal.tools.doctor.findings import CheckResult, RankFacts, Severity

FOREIGN = (
    "OMP_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM_",
    "PMI",
    "OMPI_",
    "MPI_",
    "TORCHELASTIC",
)
SHOAL = [sys.executable, "-m", "shoal"]


def environment(**more: object) -> dict[str, str]:
    """This process's environment without any launcher's variables, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**kept, "COLUMNS": "80", **{name: str(value) for name, value in more.items()}}


def call(command: Sequence[str], **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables in place of any launcher's."""
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=200, check=False
    )


def words(text: str) -> str:
    return " ".join(text.split())


def seen(facts: Sequence[Any], hosts: str = "") -> list[RankFacts[Any]]:
    """Ranks with these facts, each on a host of its own unless `hosts` has a letter for each."""
    return [
        RankFacts(rank=rank, host=hosts[rank] if hosts else f"node{rank}", facts=each)
        for rank, each in enumerate(facts)
    ]


def grave(found: Sequence[CheckResult]) -> list[tuple[str, Severity, str]]:
    return [(one.what, one.state, one.found) for one in found if one.state is not Severity.OK]
