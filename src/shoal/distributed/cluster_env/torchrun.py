"""Placement by the variables of torchrun and `shoal run`, and by those of torch's `env://`.

The latter are set by hand, or by a job controller of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.distributed.placement import (
    Placement,
    divided,
    earlier_attempts,
    integer,
    master_port,
    refuse_many_worlds,
    require,
    scheduler_job,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

RUN_ID = "shoal-run"
"""The run identifier that `shoal run` passes to torch elastic, by which workers detect it."""

NODES_RUN_ID = "shoal-run-nodes"
"""The beginning of that identifier if `shoal run` started on several nodes, even if one is left."""

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# Set in each pod by the operator of PyTorchJobs (with a prefix: torchrun reads them), by indexed Jobs
# of Kubernetes and by Volcano.
_OF_PODS = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
_PREFIX = "PET_"
_PROCESSES = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")

# The variables in which a launcher around torchrun sets the number of processes it started.
_OUTER = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def torchrun(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement by torchrun's variables, which torch.distributed.run documents."""
    require(env, _NAMES)
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    local_size = integer(env, "LOCAL_WORLD_SIZE")
    if local_size < 1 or (size % local_size and not env.get("GROUP_WORLD_SIZE")):
        raise LaunchError(
            given=f"WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}",
            found="WORLD_SIZE is not a multiple of LOCAL_WORLD_SIZE",
            fix="set GROUP_RANK and GROUP_WORLD_SIZE (node rank and number of nodes), as torchrun does",
        )
    nodes = integer(env, "GROUP_WORLD_SIZE", size // local_size)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    several = run_id.startswith(NODES_RUN_ID)
    if nodes == 1 and not several:
        check_outer(env, size)
    launcher = "shoal run" if several or run_id == RUN_ID else "torchrun"
    cores = divided(cpus, local_size)
    address, port = env["MASTER_ADDR"], master_port(env)
    return Placement(
        rank=rank,
        size=size,
        local_rank=integer(env, "LOCAL_RANK"),
        local_size=local_size,
        node=integer(env, "GROUP_RANK", rank // local_size),
        nodes=nodes,
        cores=cores.value,
        address=address,
        port=port,
        launcher=launcher,
        attempt=earlier_attempts(env) + integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        job=run_id if several else "",
        reason=spell(env, _NAMES),
        choices=(
            cores,
            Decision(what="address", value=(address,), reason=f"{launcher}: MASTER_ADDR={address}"),
            Decision(what="port", value=(port,), reason=f"{launcher}: MASTER_PORT={port}"),
        ),
    )


def check_outer(env: Mapping[str, str], size: int) -> None:
    """Raise LaunchError if another launcher started this world several times."""
    by_agent = bool(env.get("TORCHELASTIC_RUN_ID"))
    for name in _OUTER:
        # The variables of a batch script do not describe a step.
        outer = integer(env, name, 1) if name[:5] != "SLURM" or env.get("SLURM_STEP_ID") else 1
        if outer > 1 and (by_agent or outer != size):
            raise refuse_many_worlds(
                spell(env, (name, "WORLD_SIZE", "GROUP_WORLD_SIZE")),
                f"{outer} processes were started, and each started {size} ranks for one node only",
                name if name[:5] != "SLURM" else "SLURM_STEP_ID SLURM_STEP_NUM_TASKS",
            )


def by_hand(env: Mapping[str, str], cpus: int, launcher: str = "env://") -> Placement:
    """Return the placement by the variables that `init_process_group(init_method="env://")` reads.

    The rendezvous determines which ranks share a node. In a pod with one process, the local rank is 0
    of 1.
    """
    pod = "" if env.get("LOCAL_RANK") else _pod(env)
    if env.get("RANK", "0") == "0" and env.get("WORLD_SIZE") == "1":
        # In a world of size 1 the rest is known. Lightning sets no RANK.
        known = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        env = {**known, **env}
    require(env, (*_BY_HAND, *(["LOCAL_RANK"] if env.get("LOCAL_RANK") else [])))
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    address, port = env["MASTER_ADDR"], master_port(env, least=0 if size == 1 else 1)
    placed = place_rank(
        env,
        cpus,
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=integer(env, "LOCAL_RANK") if env.get("LOCAL_RANK") else None,
        address=address,
        port=port,
        sources=(f"MASTER_ADDR={address}", f"MASTER_PORT={port}"),
        reason=spell(env, (*_BY_HAND, "LOCAL_RANK")) + (f"; one process per pod: {pod}" if pod else ""),
    )
    return replace(placed, unsettled=()) if pod else placed


def place_rank(
    env: Mapping[str, str],
    cpus: int,
    *,
    launcher: str,
    rank: int,
    size: int,
    local_rank: int | None,
    address: str,
    port: int,
    sources: tuple[str, str],
    reason: str,
) -> Placement:
    """Return the placement of a rank whose launcher does not report which ranks share its node.

    `sources` say where the address and the port are from.
    """
    if size == 1:
        check_outer(env, size)
    unsettled = (*(["local_rank"] if local_rank is None else []), "local_size", "node", "nodes")
    cores = divided(cpus, 1)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank or 0,
        local_size=(local_rank or 0) + 1,
        node=rank,
        nodes=size,
        cores=cores.value,
        address=address,
        port=port,
        launcher=launcher,
        attempt=earlier_attempts(env),
        job=scheduler_job(env),
        unsettled=unsettled if size > 1 else (),
        reason=reason,
        choices=(
            cores,
            Decision(what="address", value=(address,), reason=f"{launcher}: {sources[0]}"),
            Decision(what="port", value=(port,), reason=f"{launcher}: {sources[1]}"),
        ),
    )


def _pod(env: Mapping[str, str]) -> str:
    """Return the variables that identify a pod with one process; empty if there are none."""
    names = tuple(sorted(name for name in env if name.startswith(_PREFIX) or name in _OF_PODS))
    processes = next((env[name] for name in _PROCESSES if env.get(name)), "")
    if processes.isdecimal() and int(processes) > 1:
        raise LaunchError(
            given=spell(env, ("RANK", "WORLD_SIZE", *_PROCESSES)),
            found=f"this node should run {processes} processes, but RANK is the number of the node",
            fix="start the script with `shoal run train.py` (PET_*: or `torchrun train.py`), which "
            "reads these variables. If RANK is the rank of the process, set LOCAL_RANK too",
        )
    return spell(env, names)


def check_agreement(env: Mapping[str, str], placement: Placement) -> None:
    """Raise LaunchError if RANK, WORLD_SIZE or LOCAL_RANK contradict the launcher.

    The same values, as after `RANK=$SLURM_PROCID`, are allowed.
    """
    told = dict(zip(_PLACE, (placement.rank, placement.size, placement.local_rank), strict=True))
    wrong = [
        name
        for name, value in told.items()
        if name.lower() not in placement.unsettled and integer(env, name, value) != value
    ]
    if wrong:
        names = " ".join(name for name in (*_PLACE, "LOCAL_WORLD_SIZE") if env.get(name))
        said = f"rank {placement.rank} of {placement.size}, local rank {placement.local_rank}"
        raise LaunchError(
            given=f"{spell(env, _PLACE)}; {placement.reason}",
            found=f"{placement.launcher} says {said}, which contradicts {', '.join(wrong)}",
            fix=f"unset {names}: {placement.launcher} sets all of them. If each process that it starts "
            "creates several more, set LOCAL_RANK and LOCAL_WORLD_SIZE for each of those as well",
        )
