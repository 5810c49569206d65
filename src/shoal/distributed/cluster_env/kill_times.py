"""The time from SIGTERM to SIGKILL that launchers give ranks, and their options that lengthen it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from shoal.distributed.cluster_env.mpirun import Commands


@dataclass(frozen=True, kw_only=True)
class _KillTime:
    """The usual seconds, the variable and the option that set them, and advice."""

    seconds: float
    variable: str
    option: str
    advice: str


# Measured by benchmarks/launcher_ends.py: torch 2.13, Open MPI 4.1.4 and 5.0.11, which ignores version
# 4's parameter. Others either wait (MPICH, Intel MPI), or the ranks do not know the time (Slurm).
_BY_SIGUSR1 = "have SIGUSR1 sent to mpirun, after which it waits"
_TABLE = {
    "torchrun": _KillTime(
        seconds=30,
        variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        option="--shutdown[-_]timeout",
        advice="use torchrun --shutdown-timeout {longer}",
    ),
    "shoal run": _KillTime(
        seconds=600, variable="", option="--grace", advice="use shoal run --grace {longer}"
    ),
    "Open MPI": _KillTime(
        seconds=1,
        variable="OMPI_MCA_odls_base_sigkill_timeout",
        option="",
        advice=f"use mpirun --mca odls_base_sigkill_timeout {{longer}}, or {_BY_SIGUSR1}",
    ),
    "Open MPI 5": _KillTime(seconds=0.2, variable="", option="", advice=_BY_SIGUSR1),
}


def warn_of_kill(
    launcher: str, seconds: float, env: Mapping[str, str], commands: Commands, script: str
) -> str:
    """Return a warning if a launcher would kill ranks before such a save is complete, or "".

    Options after the file name of the `script` are the script's own.
    """
    if launcher == "Open MPI" and env.get("PMIX_NAMESPACE", "").startswith("prterun"):
        launcher = "Open MPI 5"
    known = _TABLE.get(launcher)
    if known is None:
        return ""
    given = env.get(known.variable, "")
    if known.option:
        lines = (re.split(rf"\s\S*{re.escape(script)}(?:\s|$)", line)[0] for line in commands())
        found = re.search(rf"{known.option}[= ](\S+)", " ".join(lines))
        given = found[1] if found else given
    try:
        limit = float(given or known.seconds)
    except ValueError:  # which the launcher rejects itself
        return ""
    if not seconds > limit:
        return ""
    advice = known.advice.format(longer=ceil(2 * seconds))
    return (
        f"shoal: a step and a save took {seconds:.3g} s, but {launcher} kills ranks {limit:g} s after "
        f"SIGTERM, before they have saved: {advice}"
    )
