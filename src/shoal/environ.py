"""The only reader and writer of the process environment: where this process sits, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from shoal.errors import LaunchError

_T = TypeVar("_T")

RUN_ID = "shoal-run"
"""The run identifier that `shoal run` gives to torch elastic, by which workers know it."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps a new Python from looking for modules in the current directory."""

_FIX = "start the script with `shoal run -n N script.py`, or unset {names}"

# Slurm numbers its own steps (batch script, interactive shell, extern) from here up: not tasks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below the ephemeral ports (32768 up), so that no outgoing connection can hold a derived port.
_FIRST_PORT, _PORTS = 10001, 10000


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one process of the world sits, and which variables said so.

    `node` and `nodes` count machines, `cores` is this process's share of its machine's cores,
    `address` and `port` are where the first rank is met (port 0: nobody needs to be met),
    `attempt` counts restarts of the same job from 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    cores: int
    address: str
    port: int
    launcher: str
    attempt: int = 0
    reason: str

    def __post_init__(self) -> None:
        pairs = (
            ("rank", self.rank, "world size", self.size),
            ("local rank", self.local_rank, "local size", self.local_size),
            ("node", self.node, "number of nodes", self.nodes),
            ("local size less one", self.local_size - 1, "world size", self.size),
        )
        for name, value, limit_name, limit in pairs:
            if not 0 <= value < limit:
                raise LaunchError(
                    given=self.reason,
                    found=f"{name} {value} does not fit {limit_name} {limit}",
                    fix="start the script with one launcher only, without setting these by hand",
                )


def placement(env: Mapping[str, str] | None = None, *, cpus: int | None = None) -> Placement:
    """Read where this process sits from `env` (default: the process environment).

    Torchrun's variables are asked first, then those of an `srun` task; with neither, the world is
    one process. `cpus` is how many cores this process may run on (default: its CPU affinity).
    Raises LaunchError for environments that are half set or contradict themselves.
    """
    env = os.environ if env is None else env
    cpus = available_cores() if cpus is None else cpus
    for detect in _DETECTORS:
        found = detect(env, cpus)
        if found is not None:
            return found
    return _alone(env, cpus)


def available_cores() -> int:
    """How many cores this process may run on, by its CPU affinity."""
    return len(os.sched_getaffinity(0))


def worker_threads(processes: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variable that gives each of `processes` on this machine its share of the cores.

    Empty where the user has set OMP_NUM_THREADS already.
    """
    env = os.environ if env is None else env
    if env.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}


def worker_variables(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    address: str,
    port: int,
    attempt: int,
    restarts: int,
) -> dict[str, str]:
    """The variables that tell one worker of one machine its place, named as torchrun names them.

    The store at `address` and `port` is the launcher's, so no worker opens one.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


@contextmanager
def set_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process for the length of a block (None removes one), then restore."""
    before = {name: os.environ.get(name) for name in values}
    write_variables(values)
    try:
        yield
    finally:
        write_variables(before)


def write_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process for good (None removes one)."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_defaults(values: Mapping[str, str]) -> None:
    """Set those of the variables for good that are not set yet."""
    write_variables({name: value for name, value in values.items() if name not in os.environ})


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


def _torchrun(env: Mapping[str, str], cpus: int) -> Placement | None:
    if not (env.get("RANK") or env.get("LOCAL_RANK")):
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if env.get("RANK") == "0" and env.get("WORLD_SIZE") == "1":
        # In a world of one the rest is known.
        known = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **env}
    _require(env, names)
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_size = _integer(env, "LOCAL_WORLD_SIZE")
    if local_size < 1 or (size % local_size and not env.get("GROUP_WORLD_SIZE")):
        raise LaunchError(
            given=f"WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}",
            found="the world does not divide into machines of that many processes",
            fix="set GROUP_RANK and GROUP_WORLD_SIZE (machine and machines), as torchrun does",
        )
    ours = env.get("TORCHELASTIC_RUN_ID") == RUN_ID
    return Placement(
        rank=rank,
        size=size,
        local_rank=_integer(env, "LOCAL_RANK"),
        local_size=local_size,
        node=_integer(env, "GROUP_RANK", rank // local_size),
        nodes=_integer(env, "GROUP_WORLD_SIZE", size // local_size),
        cores=max(1, cpus // local_size),
        address=env["MASTER_ADDR"],
        port=_integer(env, "MASTER_PORT"),
        launcher="shoal run" if ours else "torchrun",
        attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        reason=_spell(env, names),
    )


def _srun(env: Mapping[str, str], cpus: int) -> Placement | None:
    # The batch script and a shell under salloc have SLURM_PROCID too, but are not tasks of a step.
    if not env.get("SLURM_STEP_ID") or not env.get("SLURM_PROCID"):
        return None
    step = _integer(env, "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
    lists = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    _require(env, names + lists)
    size, node = _integer(env, "SLURM_NTASKS"), _integer(env, "SLURM_NODEID")
    _check_tasks(env, size)
    # Not SLURM_NODELIST, which stays the job's in a step that has fewer nodes.
    hosts = _parse(env, "SLURM_STEP_NODELIST", expand_hosts)
    tasks = _parse(env, "SLURM_STEP_TASKS_PER_NODE", expand_tasks)
    if sum(tasks) != size or not 0 <= node < len(tasks) or len(hosts) != len(tasks):
        raise LaunchError(
            given=_spell(env, ("SLURM_NTASKS", "SLURM_NODEID", *lists)),
            found=f"{sum(tasks)} tasks on {len(tasks)} nodes, and {len(hosts)} hosts",
            fix="start the script with srun itself, in an environment not edited by hand",
        )
    derived = _FIRST_PORT + (_integer(env, "SLURM_JOB_ID") * 61 + step) % _PORTS
    return Placement(
        rank=_integer(env, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID"),
        local_size=tasks[node],
        node=node,
        nodes=len(tasks),
        cores=_task_cores(env, cpus, tasks[node]),
        address=env.get("MASTER_ADDR") or hosts[0],
        port=_integer(env, "MASTER_PORT", derived),
        launcher="srun",
        attempt=_integer(env, "SLURM_RESTART_COUNT", 0),
        reason=_spell(env, ("SLURM_STEP_ID", *names, *lists)),
    )


def _check_tasks(env: Mapping[str, str], size: int) -> None:
    """Refuse numbers of tasks that another variable contradicts."""
    per_node = _integer(env, "SLURM_NTASKS_PER_NODE", 1)
    if per_node > size:
        raise LaunchError(
            given=_spell(env, ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")),
            found=f"{size} task(s) in all, but {per_node} asked for on each node",
            fix=f"drop --ntasks, or give `srun --ntasks={size} --ntasks-per-node={size}`",
        )
    if env.get("WORLD_SIZE") and _integer(env, "WORLD_SIZE") != size:
        raise LaunchError(
            given=_spell(env, ("SLURM_NTASKS", "WORLD_SIZE")),
            found="srun started another number of processes than WORLD_SIZE says",
            fix="unset WORLD_SIZE: srun's own variables say everything",
        )


def _task_cores(env: Mapping[str, str], cpus: int, local_size: int) -> int:
    """How many cores one task may use, where `cpus` are in its affinity."""
    if env.get("SLURM_CPUS_PER_TASK"):
        # Since 22.05 srun inherits the job's variable without its binding: the affinity decides.
        return max(1, min(cpus, _integer(env, "SLURM_CPUS_PER_TASK")))
    on_node = _integer(env, "SLURM_CPUS_ON_NODE", cpus)
    # Fewer than the node's: this task is bound, and they are its own. Otherwise all share them.
    return cpus if cpus < on_node else max(1, on_node // local_size)


def _alone(env: Mapping[str, str], cpus: int) -> Placement:
    if env.get("WORLD_SIZE", "1") not in ("", "1"):
        _require(env, ("WORLD_SIZE", "RANK"))
    return Placement(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        nodes=1,
        cores=cpus,
        address="127.0.0.1",
        port=0,
        launcher="none",
        reason="no launcher's variables are set",
    )


# First match wins: torchrun started by srun leaves both sets, and then torchrun's are the nearer.
_DETECTORS: tuple[Callable[[Mapping[str, str], int], Placement | None], ...] = (_torchrun, _srun)


def _require(env: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = tuple(name for name in names if env.get(name))
        raise LaunchError(
            given=_spell(env, present),
            found=f"{', '.join(missing)} not set",
            fix=_FIX.format(names=" ".join(present)),
        )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    return _parse(env, name, int)


def _parse(env: Mapping[str, str], name: str, read: Callable[[str], _T]) -> _T:
    try:
        return read(env[name])
    except ValueError:
        raise LaunchError(
            given=f"{name}={env[name]}",
            found=f"{name} can't be read",
            fix=_FIX.format(names=name),
        ) from None


def _spell(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
