"""Placement of tasks of a Slurm step; tests/distributed/recorded has each variable in Slurm 22.05."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.distributed.cluster_env.host_lists import expand_hosts, expand_tasks
from shoal.distributed.placement import (
    Placement,
    earlier_attempts,
    integer,
    meet,
    parse,
    require,
    scheduler_job,
    spell,
)
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

# Slurm numbers its own steps (batch script, interactive shell, extern) from here up: not tasks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
# Not SLURM_NODELIST, which lists the nodes of the job even in a step with fewer nodes.
_LISTS = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")

_BY_HAND = "start the script with srun, and do not edit its variables by hand"


def is_task(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of a step; a batch script or a shell under salloc is not."""
    if not env.get("SLURM_STEP_ID"):
        if integer(env, "SLURM_PROCID", 0) > 0:
            # Only tasks have such a rank: a container or a wrapper removed the other variables.
            require(env, ("SLURM_PROCID", "SLURM_STEP_ID"))
        return False
    return bool(env.get("SLURM_PROCID")) and integer(env, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def is_copy(env: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE are those of a task, as `idr_torch` sets them for `env://`."""
    numbers = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
    return is_task(env) and (env.get("RANK"), env.get("WORLD_SIZE")) == numbers


def srun(env: Mapping[str, str], cpus: int) -> Placement:
    """Return the placement of a task under `srun`."""
    require(env, _NAMES + _LISTS)
    rank, size = integer(env, "SLURM_PROCID"), integer(env, "SLURM_NTASKS")
    node, step = integer(env, "SLURM_NODEID"), integer(env, "SLURM_STEP_ID")
    warning = _check_tasks(env, size)
    hosts = parse(env, "SLURM_STEP_NODELIST", expand_hosts)
    tasks = parse(env, "SLURM_STEP_TASKS_PER_NODE", expand_tasks)
    if sum(tasks) != size or not 0 <= node < len(tasks) or len(hosts) != len(tasks):
        raise LaunchError(
            given=spell(env, ("SLURM_NTASKS", "SLURM_NODEID", *_LISTS)),
            found=f"{sum(tasks)} tasks on {len(tasks)} nodes, and {len(hosts)} hosts",
            fix=_BY_HAND,
        )
    attempt = earlier_attempts(env)
    job = integer(env, "SLURM_JOB_ID")
    cores = _cores(env, cpus, tasks[node])
    meeting = meet(
        env,
        job=f"{scheduler_job(env)}.{step}-{attempt}",
        hosts=_first_rank(env, hosts, _ranks_here(env, rank, tasks[node]), node),
        number=job * 61 + step,
        others=tuple(host for index, host in enumerate(hosts) if index != node),
    )
    return Placement(
        rank=rank,
        size=size,
        local_rank=integer(env, "SLURM_LOCALID"),
        local_size=tasks[node],
        node=node,
        nodes=len(tasks),
        cores=cores.value,
        address=meeting.hosts[0],
        port=meeting.ports[0],
        launcher="srun",
        attempt=attempt,
        job=scheduler_job(env),
        meeting=meeting,
        warning=warning,
        reason=spell(env, ("SLURM_STEP_ID", *_NAMES, *_LISTS)),
        choices=(cores, *meeting.choices),
    )


def idle_tasks(env: Mapping[str, str]) -> str:
    """Return a warning for one process outside of a step if its job has room for more; else ""."""
    tasks = max(integer(env, "SLURM_NTASKS", 1), integer(env, "SLURM_JOB_NUM_NODES", 1))
    if tasks == 1:
        return ""
    return (
        f"one process in a Slurm job with room for {tasks} (job {env.get('SLURM_JOB_ID')}): "
        "`srun python train.py` starts one per task"
    )


def _check_tasks(env: Mapping[str, str], size: int) -> str:
    """Return a warning for a step that uses a part of its job, else "".

    Raises LaunchError if the numbers contradict each other.
    """
    if integer(env, "SLURM_STEP_NUM_TASKS", size) != size:
        raise LaunchError(
            given=spell(env, ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")),
            found="SLURM_STEP_NUM_TASKS is not the number of processes that srun started",
            fix=_BY_HAND,
        )
    per_node = integer(env, "SLURM_NTASKS_PER_NODE", 1)
    if per_node <= size:
        return ""
    if not _has_room(env, per_node):
        raise LaunchError(
            given=spell(env, ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")),
            found=f"{size} task(s) in total, but {per_node} requested on each node",
            fix=f"drop --ntasks, or give `srun --ntasks={size} --ntasks-per-node={size}`",
        )
    return f"a step of {size} task(s), in a job with room for {per_node} on each node"


def _has_room(env: Mapping[str, str], per_node: int) -> bool:
    """Return whether the job has the cores for `per_node` tasks, so that a smaller step is one of
    several.

    SLURM_NTASKS_PER_NODE is the job's, even in a step to which `srun -n1` gave a part of it.
    """
    if not env.get("SLURM_JOB_CPUS_PER_NODE"):
        return False
    cpus = parse(env, "SLURM_JOB_CPUS_PER_NODE", expand_tasks)
    return max(cpus) >= per_node * integer(env, "SLURM_CPUS_PER_TASK", 1)


def _ranks_here(env: Mapping[str, str], rank: int, local_size: int) -> list[int]:
    """Return the ranks on this node, by local rank, as Slurm lists them for any distribution."""
    text = env.get("SLURM_GTIDS")
    if not text:
        return [rank]
    ranks = parse(env, "SLURM_GTIDS", lambda value: [int(item) for item in value.split(",")])
    local = integer(env, "SLURM_LOCALID")
    if len(ranks) != local_size or not 0 <= local < local_size or ranks[local] != rank:
        raise LaunchError(
            given=spell(env, ("SLURM_GTIDS", "SLURM_PROCID", "SLURM_LOCALID", _LISTS[1])),
            found=f"the ranks on this node are {text}, but task {local} of them has rank {rank}",
            fix=_BY_HAND,
        )
    return ranks


def _first_rank(
    env: Mapping[str, str], hosts: list[str], here: list[int], node: int
) -> Decision[tuple[str, ...]]:
    """Return the hosts that may have rank 0: the first host, except with a user's list (`-m
    arbitrary`).
    """
    listed = spell(env, _LISTS[:1])
    if 0 in here:
        return _at((hosts[node],), f"rank 0 is on this node: {spell(env, ('SLURM_GTIDS',)) or listed}")
    if "arbitrary" in env.get("SLURM_DISTRIBUTION", ""):
        # The list of nodes is sorted; the list of tasks, SLURM_HOSTFILE, may be missing on this node.
        others = tuple(host for index, host in enumerate(hosts) if index != node)
        return _at(others, f"rank 0 is on another node (-m arbitrary): {listed}")
    return _at((hosts[0],), f"rank 0 is on the first node of the step: {listed}")


def _at(hosts: tuple[str, ...], reason: str) -> Decision[tuple[str, ...]]:
    return Decision(what="address", value=hosts, reason=reason)


def _cores(env: Mapping[str, str], cpus: int, local_size: int) -> Decision[int]:
    """Return the number of cores that one task may use if `cpus` are in its affinity."""
    if env.get("SLURM_CPUS_PER_TASK"):
        # Since 22.05 srun inherits the job's variable without its binding: the affinity decides.
        asked = integer(env, "SLURM_CPUS_PER_TASK")
        value, why = min(cpus, asked), f"SLURM_CPUS_PER_TASK={asked}, and {cpus} in its affinity"
    else:
        # Fewer than the node has: this task is bound to them. Otherwise all tasks share them.
        on_node = integer(env, "SLURM_CPUS_ON_NODE", cpus)
        bound = cpus < on_node
        value = cpus if bound else on_node // max(1, local_size)
        how = f"the {cpus} that it is bound to" if bound else f"divided by {local_size} task(s)"
        why = f"SLURM_CPUS_ON_NODE={on_node}, {how}; SLURM_CPUS_PER_TASK is not set"
    return Decision(what="cores", value=max(1, value), reason=why)
