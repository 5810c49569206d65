"""Calls of Slurm's commands."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from shoal.distributed import env_vars
from shoal.util.errors import LaunchError

_SECONDS = 60.0
# Errors of Slurm's commands on a machine that has them and belongs to no cluster, or is cut off.
_UNREACHED = re.compile("configuration source|unable to contact slurm|DNS SRV", re.IGNORECASE)
_UNKNOWN = re.compile("invalid job id", re.IGNORECASE)


def run_command(command: Sequence[str], *, known: bool = True, errors: bool = False) -> str:
    """Run a command of Slurm and return its output, with `errors` also that to stderr.

    Raises LaunchError if it is missing, reaches no cluster, or fails. If jobs need not be `known`, it
    may fail because Slurm does not know a job, or no longer knows it.
    """
    to_submit = command[0] == "sbatch"
    elsewhere = "; `--dry-run` needs none" if to_submit else ""
    try:
        done = subprocess.run(
            command,
            env=env_vars.outside_of_jobs(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            given=" ".join(command[:2]),
            found=f"there is no {command[0]} on this machine's PATH",
            fix=f"run this on a login node{elsewhere}",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            given=" ".join(command),
            found=f"no answer within {_SECONDS:.0f} s: Slurm's controller is down or overloaded",
            fix="try again when `scontrol ping` gets an answer",
        ) from None
    if done.returncode and _UNREACHED.search(done.stderr):
        raise LaunchError(
            given=" ".join(command[:2]),
            found="Slurm is installed here but reaches no cluster",
            fix=f"run this on a login node, where `scontrol ping` gets an answer{elsewhere}",
        )
    if done.returncode and (known or not _is_unknown(done.stderr)):
        shown = "; `--dry-run` shows the batch script" if to_submit else ""
        raise LaunchError(
            given=" ".join(command),
            found=done.stderr.strip() or f"exit code {done.returncode}",
            fix=f"change the option that Slurm rejects{shown}",
        )
    return done.stdout + (done.stderr if errors else "")


def _is_unknown(said: str) -> bool:
    """Return whether all errors that a command printed are about jobs that Slurm does not know."""
    return all(_UNKNOWN.search(line) for line in said.strip().splitlines())
