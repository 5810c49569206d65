"""Lists of machines as schedulers write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's compressed list: `"n[01-02,7],gpu5"` gives n01, n02, n7, gpu5.

    Done here and not by `scontrol`, which is missing inside most containers.
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


def allocated(env: Mapping[str, str]) -> tuple[str, ...]:
    """The machines that a scheduler gave to this job, in its order; empty where none says.

    Slurm: SLURM_JOB_NODELIST. PBS: PBS_NODEFILE (qsub(1B)), which not every machine of a job can
    read. LSF: LSB_DJOB_HOSTFILE, or the pairs of host and slots in LSB_MCPU_HOSTS ("Environment
    variables set for job execution" of its reference).
    """
    hosts: list[str] = []
    if env.get("SLURM_JOB_NODELIST"):
        with suppress(ValueError):
            hosts = expand_hosts(env["SLURM_JOB_NODELIST"])
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if not hosts and env.get(name):
            with suppress(OSError):
                hosts = Path(env[name]).read_text().split()
    if not hosts:
        hosts = env.get("LSB_MCPU_HOSTS", "").split()[::2]
    return tuple(dict.fromkeys(hosts))
