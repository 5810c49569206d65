"""Placement by launchers that can't run where Shoal is developed, by their documentation."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.distributed.cluster_env.host_lists import allocated
from shoal.distributed.placement import Placement, divided, integer, meet, one_machine, require, spell
from shoal.util.errors import LaunchError

_PALS = ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_NODEID", "PALS_APID", "PMI_SIZE")
_FLUX = (
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "FLUX_JOB_SIZE",
    "FLUX_JOB_NNODES",
    "FLUX_JOB_ID",
)


def pals(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a rank of HPE's PALS, the `mpiexec` of Cray machines under PBS.

    PALS_* are in mpiexec(1) of PALS, PMI_SIZE and PMI_LOCAL_SIZE in intro_pmi(3) of cray-pmi.
    """
    local = "PALS_LOCAL_SIZE" if env.get("PALS_LOCAL_SIZE") else "PMI_LOCAL_SIZE"
    names = (*_PALS, local)
    require(env, names)
    size, local_size = integer(env, "PMI_SIZE"), integer(env, local)
    return _place(
        env,
        names,
        cpus,
        rank=integer(env, "PALS_RANKID"),
        size=size,
        local_rank=integer(env, "PALS_LOCAL_RANKID"),
        local_size=local_size,
        node=integer(env, "PALS_NODEID"),
        nodes=-(-size // max(1, local_size)),
        launcher="PALS",
        job=f"pals-{env['PALS_APID']}",
    )


def flux(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a task of `flux run` (flux-environment(7)).

    Flux does not set the number of tasks of this node, so it must be the same on all nodes.
    """
    require(env, _FLUX)
    rank, size = integer(env, "FLUX_TASK_RANK"), integer(env, "FLUX_JOB_SIZE")
    nodes = integer(env, "FLUX_JOB_NNODES")
    if nodes < 1 or size % nodes:
        raise LaunchError(
            given=spell(env, ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES")),
            found="the nodes have different numbers of tasks, and Flux does not publish these numbers",
            fix="flux run -N NODES --tasks-per-node=N, the same on every node",
        )
    return _place(
        env,
        _FLUX,
        cpus,
        rank=rank,
        size=size,
        local_rank=integer(env, "FLUX_TASK_LOCAL_ID"),
        local_size=size // nodes,
        node=rank * nodes // size if size else 0,
        nodes=nodes,
        launcher="Flux",
        job=f"flux-{env['FLUX_JOB_ID']}",
    )


def _place(
    env: Mapping[str, str],
    names: tuple[str, ...],
    cpus: int,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node: int,
    nodes: int,
    launcher: str,
    job: str,
) -> Placement:
    hosts = one_machine(spell(env, names)) if local_size == size else allocated(env)
    meeting = meet(env, job=job, hosts=hosts, shared=not hosts.value)
    cores = divided(cpus, local_size)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        cores=cores.value,
        address=meeting.hosts[0] if meeting.hosts else "",
        port=meeting.ports[0],
        launcher=launcher,
        meeting=meeting,
        reason=spell(env, names),
        choices=(cores, *meeting.choices),
    )
