"""Detection of the launcher that started this process, by one table in a fixed order.

Only lists of hosts are read from files; all else is computed from the environment variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from shoal.distributed.cluster_env.host_lists import expand_hosts, expand_tasks
from shoal.distributed.cluster_env.mpirun import Commands, hydra, jsrun, open_mpi
from shoal.distributed.cluster_env.slurm import idle_tasks, is_copy, is_task, srun
from shoal.distributed.cluster_env.torchrun import (
    NODES_RUN_ID,
    RUN_ID,
    by_hand,
    check_agreement,
    place_rank,
    torchrun,
)
from shoal.distributed.cluster_env.untested import flux, pals
from shoal.distributed.placement import (
    DIRECTORY,
    PORTS,
    Meeting,
    Placement,
    earlier_attempts,
    require,
    scheduler_job,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

REQUEUE = 75
"""Exit code of a rank that received a signal to stop, has saved, and asks to be restarted: EX_TEMPFAIL
of sysexits.h, a failure that another attempt can fix.
"""

MAY_DIE = b"may die alone"
"""Message of a rank to its launcher if the other ranks would continue without it."""

LEFT = b"left "
"""Message of a rank to its launcher when it leaves the others without an error, followed by JSON: the
place in the user's code, whether its script has ended, and the time in seconds of `time.monotonic`; or
null when it joins them again.
"""

__all__ = [
    "ADDED",
    "DIRECTORY",
    "LAUNCHERS",
    "LEFT",
    "MAY_DIE",
    "NODES_RUN_ID",
    "PORTS",
    "REQUEUE",
    "RUN_ID",
    "Commands",
    "ClusterEnvironment",
    "Meeting",
    "Placement",
    "adopt",
    "detect",
    "expand_hosts",
    "expand_tasks",
    "marks_found",
    "order_of_detection",
    "place_rank",
]


@dataclass(frozen=True, kw_only=True)
class ClusterEnvironment:
    """A launcher: the variables that identify it, the reason for its place in the order, and the
    source.

    One of `marks` is enough to identify it. If other variables are missing then, that is an error, and
    no other launcher is tried.
    """

    name: str
    marks: tuple[str, ...]
    why_here: str
    source: str
    read: Callable[[Mapping[str, str], int, Commands], Placement]

    def started(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process with this environment."""
        if self.marks == _SLURM:
            return is_task(env)
        if self.marks == _TORCHRUN and not env.get("TORCHELASTIC_RUN_ID"):
            # Without it, Ray Train or the variables of a Slurm task set LOCAL_WORLD_SIZE.
            return bool(env.get("LOCAL_WORLD_SIZE")) and not (is_copy(env) or env.get(_RAY[0]))
        return any(env.get(name) for name in self.marks)

    def why_not(self, env: Mapping[str, str], chosen: str) -> str:
        """Return the reason why `chosen` was detected and not this launcher."""
        found = spell(env, self.marks)
        if chosen and found:
            return f"{found} is set too, but {chosen} is checked earlier"
        missing = [name for name in self.marks if not env.get(name)]
        if missing:
            return f"{' and '.join(missing)} not set" + (f" (but {found})" if found else "")
        return f"{found}: one of Slurm's own steps, which has no tasks"


_SLURM = ("SLURM_STEP_ID", "SLURM_PROCID")
_TORCHRUN = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_RAY = ("RAY_RAYLET_PID",)

LAUNCHERS = (
    ClusterEnvironment(
        name="torchrun, shoal run",
        marks=_TORCHRUN,
        why_here="first: others start its agents, and workers inherit their variables",
        source="torch.distributed.run; torch 2.13, recorded",
        read=lambda env, cpus, _: torchrun(env, cpus),
    ),
    ClusterEnvironment(
        name="Ray",
        marks=_RAY,
        why_here="before others: Ray's workers inherit the variables of what started their raylet",
        source="Ray 2.60, recorded",
        read=lambda env, cpus, _: _in_ray(env, cpus),
    ),
    ClusterEnvironment(
        name="jsrun (LSF)",
        marks=("JSM_NAMESPACE_RANK",),
        why_here="before Open MPI: Spectrum MPI under jsrun sets OMPI_COMM_WORLD_* too",
        source="IBM Spectrum LSF and JSM, documentation",
        read=lambda env, cpus, _: jsrun(env, cpus),
    ),
    ClusterEnvironment(
        name="Open MPI, PRRTE",
        marks=("OMPI_COMM_WORLD_RANK",),
        why_here="before srun: inside an allocation mpirun starts its daemons as tasks of a step",
        source="Open MPI 4.1 and 5.0, recorded",
        read=lambda env, cpus, _: open_mpi(env, cpus),
    ),
    ClusterEnvironment(
        name="Hydra (MPICH, Intel MPI)",
        marks=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        why_here="before srun, as Open MPI; srun --mpi=pmi2 sets PMI_RANK, but not these two",
        source="MPICH 4.0 and 5.0, Intel MPI 2021, recorded",
        read=hydra,
    ),
    ClusterEnvironment(
        name="PALS (PBS)",
        marks=("PALS_RANKID",),
        why_here="after Hydra, which can run under PBS too and sets no variables of PALS",
        source="mpiexec(1) of HPE PALS",
        read=lambda env, cpus, _: pals(env, cpus),
    ),
    ClusterEnvironment(
        name="Flux",
        marks=("FLUX_TASK_RANK",),
        why_here="before srun: an instance of Flux can be a step of a Slurm job",
        source="flux-environment(7)",
        read=lambda env, cpus, _: flux(env, cpus),
    ),
    ClusterEnvironment(
        name="srun",
        marks=_SLURM,
        why_here="after these: srun starts most of them, with --mpi=pmi2 and pmix its tasks itself",
        source="Slurm 22.05, recorded",
        read=lambda env, cpus, _: srun(env, cpus),
    ),
    ClusterEnvironment(
        name="env://",
        marks=("RANK", "LOCAL_RANK"),
        why_here="last: scripts copy these from a launcher above, whose variables say more",
        source="torch.distributed; PyTorchJob of Kubeflow's training operator, its source",
        read=lambda env, cpus, _: by_hand(env, cpus),
    ),
)
"""All launchers, in the order in which they are checked. The first that is identified decides.

If several have left their variables, the launcher closest to the process must win.
"""

ADDED: list[ClusterEnvironment] = []
"""The launchers of `shoal.add_launcher`."""


def _table() -> tuple[ClusterEnvironment, ...]:
    return (LAUNCHERS[0], *ADDED, *LAUNCHERS[1:])


def detect(env: Mapping[str, str], cpus: int, commands: Commands) -> Placement:
    """Return the placement of a process with environment `env` and `cpus` in its affinity.

    Without a launcher, the world size is 1. Raises LaunchError if variables are missing or contradict
    each other.
    """
    table = _table()
    chosen = next((one for one in table if one.started(env)), None)
    if chosen is None:
        placement, reason = _alone(env, cpus), ""
    else:
        placement = chosen.read(env, cpus, commands)
        if chosen is not LAUNCHERS[0]:
            check_agreement(env, placement)
        reason = f"{spell(env, chosen.marks)}; checked {chosen.why_here}"
    earlier = table if chosen is None else table[: table.index(chosen)]
    launcher = Decision(
        what="launcher",
        value=placement.launcher,
        reason=reason or placement.reason,
        rejected={
            one.name: one.why_not(env, "" if one in earlier else placement.launcher)
            for one in table
            if one is not chosen
        },
    )
    return replace(placement, choices=(launcher, *placement.choices))


def adopt(env: Mapping[str, str], cpus: int, commands: Commands, *, rank: int, size: int) -> Placement:
    """Return the placement of a rank of a process group that exists, which counts more than variables.

    The launcher, its attempt and its job are those of the variables if these agree with the group.
    """
    found, warning = None, ""
    with suppress(LaunchError):  # variables that are incomplete do not matter
        found = detect(env, cpus, commands)
    if found is not None and (found.rank, found.size) != (rank, size):
        if found.size > 1:
            said = f"rank {found.rank} of {found.size} by {found.launcher}"
            warning = f"{said} is rank {rank} of {size} of the process group that exists"
        found = None
    placed = place_rank(
        env,
        cpus,
        launcher="init_process_group" if found is None else found.launcher,
        rank=rank,
        size=size,
        local_rank=None,
        address="",
        port=0,
        sources=("", ""),
        reason=f"rank {rank} of {size} of the process group that exists",
    )
    why = placed.reason if found is None else f"{placed.reason}; {found.reason}"
    launcher = Decision(what="launcher", value=placed.launcher, reason=why)
    cores = [choice for choice in placed.choices if choice.what == "cores"]
    return replace(
        placed,
        attempt=placed.attempt if found is None else found.attempt,
        job=placed.job if found is None else found.job,
        warning=warning,
        choices=(launcher, *cores),
    )


def marks_found(env: Mapping[str, str]) -> dict[str, str]:
    """Return each launcher, in the order of detection, with those of its variables that are set."""
    return {launcher.name: spell(env, launcher.marks) for launcher in _table()}


def order_of_detection() -> str:
    """Return the table as text, one launcher per line: variables, name, reason, source."""
    return "\n".join(
        f"{' or '.join(one.marks)}: {one.name}; {one.why_here} [{one.source}]" for one in LAUNCHERS
    )


def _in_ray(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a task or an actor: by RANK and WORLD_SIZE, if set, or alone."""
    if env.get("RANK"):
        return by_hand(env, cpus, launcher="Ray")
    return replace(_alone({}, cpus), launcher="Ray", reason=f"{spell(env, _RAY)}; RANK is not set")


def _alone(env: Mapping[str, str], cpus: int) -> Placement:
    # The remaining variables of an unknown launcher must not lead to N worlds of size 1.
    if env.get("WORLD_SIZE", "1") not in ("", "1"):
        require(env, ("WORLD_SIZE", "RANK"))
    if env.get("PMI_SIZE", "1") not in ("", "1"):
        require(env, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    # Slurm's shell in an allocation sets it too if pmix is the site's default.
    if env.get("PMIX_RANK") and not env.get("SLURM_STEP_ID"):
        require(env, ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    batch = spell(env, ("SLURM_JOB_ID",))
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
        attempt=earlier_attempts(env),
        job=scheduler_job(env),
        warning=idle_tasks(env) if batch else "",
        reason=f"{batch}, but this is not a task of a step: it is a batch script or a shell"
        if batch
        else "no launcher's variables are set",
        choices=(
            Decision(what="cores", value=cpus, reason=f"{cpus} core(s) in its affinity"),
            Decision(what="address", value=("127.0.0.1",), reason="one process needs no rendezvous"),
        ),
    )
