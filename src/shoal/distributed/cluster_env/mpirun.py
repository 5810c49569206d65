"""Placement of ranks of `mpirun`, `mpiexec` and `jsrun`, which set no address of rank 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from shoal.distributed.cluster_env.host_lists import allocated
from shoal.distributed.cluster_env.slurm import is_task
from shoal.distributed.placement import (
    Meeting,
    Placement,
    divided,
    earlier_attempts,
    integer,
    meet,
    one_machine,
    refuse_many_worlds,
    require,
    scheduler_job,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

Commands = Callable[[], Iterable[str]]
"""A function that returns the command lines of this process's ancestors, nearest first."""

_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_JSM = (
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def open_mpi(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a rank of Open MPI 4 (its own runtime) or 5 (PRRTE)."""
    require(env, (*_OPEN_MPI, "PMIX_NAMESPACE"))
    # In version 4 the name space is a number that a job of another machine may have too.
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    job = f"ompi-{env['PMIX_NAMESPACE']}-{uri}"
    here = re.fullmatch(r"prterun-(.+)-\d+@\d+", env["PMIX_NAMESPACE"])
    started_on = [here[1]] if here else re.findall(r"tcp6?://\[?([^,\]]+?)\]?:\d+", uri)
    return _place(env, _OPEN_MPI, cpus, launcher="Open MPI", job=job, hints=tuple(started_on))


def jsrun(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a rank of LSF's `jsrun` ("jsrun" in IBM's Job Step Manager manual)."""
    require(env, (*_JSM, "LSB_JOBID"))
    job = f"jsm-{env['LSB_JOBID']}-{env.get('PMIX_NAMESPACE', '')}"
    return _place(env, _JSM, cpus, launcher="jsrun", job=job)


def hydra(env: Mapping[str, str], cpus: int, commands: Commands) -> Placement:
    """Return the placement of a rank of Hydra: MPICH, Intel MPI, MVAPICH.

    Only Intel MPI sets an identifier of the job. Otherwise the port of `mpiexec` identifies it; it is
    in the command line of the proxy that started this process.
    """
    require(env, _HYDRA)
    job, host = env.get("I_MPI_HYDRA_UUID", ""), ""
    if not job:
        found = re.search(r"--control-port (\S+):(\d+)", " ".join(commands()))
        if found:
            job, host = found[0], found[1]
        elif not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
            raise LaunchError(
                given=spell(env, _HYDRA),
                found="no mpiexec proxy, which identifies the job, among this process's parents",
                fix="export MASTER_ADDR and MASTER_PORT (host and free port of the first rank)",
            )
    return _place(
        env, _HYDRA, cpus, launcher="Hydra", job=f"hydra-{job}", hints=(host,) if host else ()
    )


def _place(
    env: Mapping[str, str],
    names: tuple[str, str, str, str],
    cpus: int,
    *,
    launcher: str,
    job: str,
    hints: tuple[str, ...] = (),
) -> Placement:
    rank, size, local_rank, local_size = (integer(env, name) for name in names)
    if size == 1:
        _check_alone(env, names[1])
    if local_size < 1:
        raise LaunchError(
            given=spell(env, names),
            found=f"{names[3]} is below 1",
            fix="start the script with mpirun, and do not edit its variables by hand",
        )
    nodes = integer(env, "OMPI_MCA_orte_num_nodes", -(-size // local_size))
    nodes = 1 if local_size == size else nodes
    here = one_machine(spell(env, names[1::2])) if nodes == 1 else None
    meeting = _meeting(env, job, hints, here)
    cores = divided(cpus, local_size)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=min(rank // local_size, nodes - 1),
        nodes=nodes,
        cores=cores.value,
        address=meeting.hosts[0] if meeting.hosts else "",
        port=meeting.ports[0],
        launcher=launcher,
        attempt=earlier_attempts(env),
        job=scheduler_job(env),
        meeting=meeting,
        unsettled=() if nodes == 1 else ("node", "nodes"),
        reason=spell(env, names),
        choices=(cores, *meeting.choices),
    )


def _meeting(
    env: Mapping[str, str], job: str, hints: tuple[str, ...], here: Decision[tuple[str, ...]] | None
) -> Meeting:
    if here is not None:
        return meet(env, job=job, hosts=here)
    hosts = allocated(env)
    if hosts.value:
        return meet(env, job=job, hosts=hosts)
    # Rank 0 is usually on the host of mpirun, but not always, so it also publishes its address.
    guess = "; mpirun was started here" if hints else ""
    hosts = Decision(what="address", value=hints, reason=f"{hosts.reason}{guess}")
    return meet(env, job=job, hosts=hosts, shared=True)


def _check_alone(env: Mapping[str, str], name: str) -> None:
    """Raise LaunchError for `srun -n 4 mpirun -n 1`, which gives four worlds of size 1."""
    if is_task(env) and integer(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise refuse_many_worlds(
            spell(env, (name, "SLURM_STEP_NUM_TASKS")),
            "srun started several processes, and each started one",
            "SLURM_STEP_ID SLURM_PROCID SLURM_STEP_NUM_TASKS",
        )
