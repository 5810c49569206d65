"""Placement by the variables of torch's `env://`, set by hand or by a job controller of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.distributed.cluster_env.torchrun import check_outer
from shoal.distributed.placement import (
    Placement,
    divided,
    integer,
    master_port,
    require,
    slurm_job,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# Set in each pod by the operator of PyTorchJobs (with a prefix: torchrun reads them), by indexed Jobs
# of Kubernetes and by Volcano.
_OF_PODS = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
_PREFIX = "PET_"
_PROCESSES = "PET_NPROC_PER_NODE"


def by_hand(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement by the variables that `init_process_group(init_method="env://")` reads.

    The rendezvous determines which ranks share a node. In a pod with one process, the local rank is 0
    of 1.
    """
    if env.get("RANK") == "0" and env.get("WORLD_SIZE") == "1":
        # In a world of size 1 the rest is known.
        env = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **env}
    require(env, (*_NAMES, *(["LOCAL_RANK"] if env.get("LOCAL_RANK") else [])))
    rank, size = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    local_rank = integer(env, "LOCAL_RANK", 0)
    if size == 1:
        check_outer(env, size)
    pod = "" if env.get("LOCAL_RANK") else _pod(env, size)
    unsettled: tuple[str, ...] = ("local_rank", "local_size", "node", "nodes")
    if env.get("LOCAL_RANK"):
        unsettled = unsettled[1:]
    cores = divided(cpus, 1)
    address, port = env["MASTER_ADDR"], master_port(env, least=0 if size == 1 else 1)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_rank + 1,
        node=rank,
        nodes=size,
        cores=cores.value,
        address=address,
        port=port,
        launcher="env://",
        attempt=integer(env, "SLURM_RESTART_COUNT", 0),
        job=slurm_job(env),
        unsettled=() if pod or size == 1 else unsettled,
        reason=spell(env, (*_NAMES, "LOCAL_RANK")) + (f"; one process per pod: {pod}" if pod else ""),
        choices=(
            cores,
            Decision(what="address", value=(address,), reason=f"env://: MASTER_ADDR={address}"),
            Decision(what="port", value=(port,), reason=f"env://: MASTER_PORT={port}"),
        ),
    )


def _pod(env: Mapping[str, str], size: int) -> str:
    """Return the variables that identify a pod with one process; empty if there are none."""
    names = tuple(sorted(name for name in env if name.startswith(_PREFIX) or name in _OF_PODS))
    processes = env.get(_PROCESSES, "")
    if processes.isdecimal() and int(processes) > 1:
        raise LaunchError(
            given=spell(env, ("RANK", "WORLD_SIZE", _PROCESSES)),
            found=f"this pod should run {processes} processes, but RANK is the rank of the pod",
            fix="start the script with torchrun, which reads the variables PET_*: `torchrun train.py`",
        )
    return spell(env, names)


def check_agreement(env: Mapping[str, str], placement: Placement) -> None:
    """Raise LaunchError if RANK, WORLD_SIZE or LOCAL_RANK contradict the launcher.

    The same values, as after `RANK=$SLURM_PROCID`, are allowed.
    """
    told = dict(zip(_PLACE, (placement.rank, placement.size, placement.local_rank), strict=True))
    wrong = [name for name, value in told.items() if integer(env, name, value) != value]
    if wrong:
        names = " ".join(name for name in (*_PLACE, "LOCAL_WORLD_SIZE") if env.get(name))
        said = f"rank {placement.rank} of {placement.size}, local rank {placement.local_rank}"
        raise LaunchError(
            given=f"{spell(env, _PLACE)}; {placement.reason}",
            found=f"{placement.launcher} says {said}, which contradicts {', '.join(wrong)}",
            fix=f"unset {names}: {placement.launcher} sets all of them. If each process that it starts "
            "creates several more, set LOCAL_RANK and LOCAL_WORLD_SIZE for each of those as well",
        )
