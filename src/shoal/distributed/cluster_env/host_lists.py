"""Lists of hosts in the formats of schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from shoal.util.decision import Decision

_LISTS = ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS")


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's compressed list: `"n[01-02,7],gpu5"` gives n01, n02, n7, gpu5.

    `scontrol` could do it, but is missing inside most containers.
    """
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = [
            list(_expand_ranges(part[1:-1])) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[\]]+", entry)
        ]
        hosts.extend("".join(names) for names in product(*parts))
    return hosts


def _expand_ranges(text: str) -> Iterator[str]:
    for item in text.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def expand_tasks(text: str) -> list[int]:
    """Expand Slurm's tasks per node: `"2(x2),1"` gives [2, 2, 1]."""
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(text)
        tasks.extend([int(match[1])] * int(match[2] or 1))
    return tasks


def allocated(env: Mapping[str, str]) -> Decision[tuple[str, ...]]:
    """Return the hosts that a scheduler assigned to this job, in its order; empty if there is no list.

    Slurm: SLURM_JOB_NODELIST. PBS: PBS_NODEFILE (qsub(1B)), which not every node of a job can read.
    LSF: LSB_DJOB_HOSTFILE, or the pairs of host and slots in LSB_MCPU_HOSTS ("Environment variables set
    for job execution" of its reference).
    """
    for name in _LISTS:
        hosts = tuple(dict.fromkeys(_listed(name, env[name]))) if env.get(name) else ()
        if hosts:
            reason = f"rank 0 is on one of the scheduler's nodes: {name}={env[name]}"
            return Decision(what="address", value=hosts, reason=reason)
    return Decision(what="address", value=(), reason=f"no list of nodes in {', '.join(_LISTS)}")


def _listed(name: str, text: str) -> list[str]:
    if name == "LSB_MCPU_HOSTS":
        return text.split()[::2]
    with suppress(OSError, ValueError):
        return expand_hosts(text) if name == "SLURM_JOB_NODELIST" else Path(text).read_text().split()
    return []
