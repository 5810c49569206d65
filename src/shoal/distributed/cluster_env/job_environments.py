"""Environments that name the hosts of a job, and start a script there without a launcher of ranks."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed.placement import LAST_PORT, integer, parse, spell
from shoal.util.errors import LaunchError

ALONE = "SHOAL_ALONE"
"""Set to 1: the same as `shoal.init(alone=True)`."""

PORT = 29400
"""Port of the rendezvous if the environment has none; torchrun's default."""

_BY_HAND = "do not edit these variables, or unset them and give --nodes and --rendezvous"

Env = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeVariables:
    """Variables for `shoal run`: number of this node, address of the first one, its free port, and
    processes on each node.
    """

    index: Callable[[Env], int]
    address: Callable[[Env], str]
    port: str = ""
    processes: str = ""


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """An environment in which a script can know that its job has several hosts.

    One of the variables in `hosts` identifies it, if those of `also` are set too; its function returns
    the hosts or their number. `command` starts all ranks if it is run where the script was. Without
    `nodes`, it is a batch system, which runs the script on the first host only.
    """

    name: str
    hosts: Mapping[str, Callable[[str], int | list[str]]]
    source: str
    also: tuple[str, ...] = ()
    command: str = "shoal run train.py"
    nodes: NodeVariables | None = None
    elsewhere: str = ""
    """Variable of a batch system that is above 0 on all hosts but the first."""

    def found(self, env: Env) -> tuple[str, int | list[str]]:
        """Return the variable that identifies it and the hosts, or their number; "" and 1 if none does.

        Raises LaunchError if the variable can't be read.
        """
        if all(env.get(name) for name in self.also):
            for name, read in self.hosts.items():
                if env.get(name):
                    with suppress(OSError):
                        return name, parse(env, name, read)
        return "", 1


@dataclass(frozen=True, kw_only=True)
class JobNodes:
    """The nodes of a job, as its environment has them.

    `nodes` is as for `--nodes`, `index` the number of this node, `host` and `port` the address for the
    rendezvous, and `processes` the number of processes on this node (0 if it is not given).
    """

    name: str
    nodes: str
    index: int
    host: str
    port: int
    processes: int
    reason: str


def _most(text: str) -> int:
    return int(text.rpartition(":")[2])


def _json(text: str) -> list[str]:
    names = json.loads(text)
    if not isinstance(names, list):
        raise ValueError("not a list")
    return list(dict.fromkeys(map(str, names)))


def _file(text: str) -> list[str]:
    """Return the hosts of a file with a line for each slot, or one for each host and then its slots."""
    lines = Path(text).read_text().splitlines()
    return _distinct([line.split()[0] for line in lines if line.strip()])


def _pairs(text: str) -> list[str]:
    return _distinct(text.split()[::2])


def _distinct(names: list[str]) -> list[str]:
    """Return each host once, in order, even if it is listed both with and without its domain."""
    names = [name.lower() for name in names]
    short = [name.partition(".")[0] for name in names]
    return list(dict.fromkeys(b if b in names else a for a, b in zip(names, short, strict=True)))


def _index(name: str) -> Callable[[Env], int]:
    return lambda env: integer(env, name, 0)


def _value(name: str) -> Callable[[Env], str]:
    return lambda env: env.get(name, "")


def _first_ip(env: Env) -> str:
    """Return the first of SkyPilot's addresses."""
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) not in (0, integer(env, "SKYPILOT_NUM_NODES")):
        raise LaunchError(
            given=spell(env, ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")),
            found=f"{len(addresses)} addresses",
            fix=_BY_HAND,
        )
    return addresses[0] if addresses else ""


def _main_node(env: Env) -> str:
    """Return the address of AWS Batch's main node, which has no variable with its own."""
    index = integer(env, "AWS_BATCH_JOB_NODE_INDEX", 0)
    if index == integer(env, "AWS_BATCH_JOB_MAIN_NODE_INDEX", 0):
        return socket.gethostname()
    return env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "")


def _current_host(env: Env) -> int:
    hosts, here = _json(env["SM_HOSTS"]), env.get("SM_CURRENT_HOST", "")
    if here and here not in hosts:
        raise LaunchError(
            given=spell(env, ("SM_CURRENT_HOST", "SM_HOSTS")),
            found=f"{here} is not one of {len(hosts)} host(s)",
            fix=_BY_HAND,
        )
    return hosts.index(here) if here else 0


def _split_address(text: str, port: int) -> tuple[str, int]:
    """Return the host and the port of `HOST`, `HOST:PORT`, `IPV6`, `[IPV6]` or `[IPV6]:PORT`."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text.strip())
    if match is None:
        return text.strip(), port
    return match[1] or match[2], int(match[3] or port)


JOB_ENVIRONMENTS = (
    JobEnvironment(
        name="Kubeflow Trainer",
        hosts={"PET_NNODES": _most},
        nodes=NodeVariables(
            index=_index("PET_NODE_RANK"),
            address=lambda env: env.get("PET_MASTER_ADDR") or env.get("PET_RDZV_ENDPOINT", ""),
            port="PET_MASTER_PORT",
            processes="PET_NPROC_PER_NODE",
        ),
        source="kubeflow/trainer, API 2.3",
    ),
    JobEnvironment(
        name="SkyPilot",
        hosts={"SKYPILOT_NUM_NODES": int},
        nodes=NodeVariables(
            index=_index("SKYPILOT_NODE_RANK"),
            address=_first_ip,
            processes="SKYPILOT_NUM_GPUS_PER_NODE",
        ),
        source="SkyPilot 0.14, documentation",
    ),
    JobEnvironment(
        name="dstack",
        hosts={"DSTACK_NODES_NUM": int},
        nodes=NodeVariables(
            index=_index("DSTACK_NODE_RANK"),
            address=_value("DSTACK_MASTER_NODE_IP"),
            processes="DSTACK_GPUS_PER_NODE",
        ),
        source="dstack 0.22, documentation",
    ),
    JobEnvironment(
        name="LeaderWorkerSet",
        hosts={"LWS_GROUP_SIZE": int},
        nodes=NodeVariables(index=_index("LWS_WORKER_INDEX"), address=_value("LWS_LEADER_ADDRESS")),
        source="LeaderWorkerSet 1.0",
    ),
    JobEnvironment(
        name="AWS Batch",
        hosts={"AWS_BATCH_JOB_NUM_NODES": int},
        nodes=NodeVariables(index=_index("AWS_BATCH_JOB_NODE_INDEX"), address=_main_node),
        source="AWS Batch, environment variables of multi-node parallel jobs",
    ),
    JobEnvironment(
        name="SageMaker",
        hosts={"SM_HOSTS": _json},
        nodes=NodeVariables(
            index=_current_host,
            address=lambda env: next(iter(_json(env["SM_HOSTS"])), ""),
            processes="SM_NUM_GPUS",
        ),
        source="SageMaker training toolkit, ENVIRONMENT_VARIABLES.md",
    ),
    JobEnvironment(
        name="PAI",
        hosts={"WORLD_SIZE": int},
        also=("RANK", "NPROC_PER_NODE", "MASTER_ADDR"),
        nodes=NodeVariables(
            index=_index("RANK"),
            address=_value("MASTER_ADDR"),
            port="MASTER_PORT",
            processes="NPROC_PER_NODE",
        ),
        source="Alibaba Cloud PAI, environment variables of PyTorch jobs",
    ),
    JobEnvironment(
        name="Kubernetes",
        hosts={"WORLD_SIZE": int},
        also=("JOB_COMPLETION_INDEX", "MASTER_ADDR"),
        nodes=NodeVariables(
            index=_index("JOB_COMPLETION_INDEX"), address=_value("MASTER_ADDR"), port="MASTER_PORT"
        ),
        source="indexed Jobs and JobSets, with variables of their manifest",
    ),
    JobEnvironment(
        name="Volcano (pytorch)",
        hosts={"WORLD_SIZE": int},
        also=("RANK", "VC_TASK_INDEX", "MASTER_ADDR"),
        nodes=NodeVariables(index=_index("RANK"), address=_value("MASTER_ADDR"), port="MASTER_PORT"),
        source="Volcano, job plugin pytorch; its master is not among VC_WORKER_NUM",
    ),
    JobEnvironment(
        name="Volcano",
        hosts={"VC_WORKER_NUM": int},
        nodes=NodeVariables(
            index=_index("VC_TASK_INDEX"),
            address=lambda env: env.get("VC_WORKER_HOSTS", "").partition(",")[0],
        ),
        source="Volcano, job plugin svc",
    ),
    JobEnvironment(
        name="HTCondor",
        hosts={"_CONDOR_NPROCS": int},
        command="shoal run --rendezvous HOST:29400 train.py, with the host of process 0",
        nodes=NodeVariables(index=_index("_CONDOR_PROCNO"), address=_value("MASTER_ADDR")),
        source="HTCondor, parallel universe",
    ),
    JobEnvironment(
        name="PBS",
        hosts={"PBS_NODEFILE": _file, "PBS_NUM_NODES": int},
        command="mpiexec python train.py",
        elsewhere="PBS_NODENUM",
        source="qsub(1B)",
    ),
    JobEnvironment(
        name="Grid Engine",
        hosts={"PE_HOSTFILE": _file, "NHOSTS": int},
        command="mpiexec python train.py",
        source="qsub(1) of Grid Engine 8.1",
    ),
    JobEnvironment(
        name="LSF",
        hosts={"LSB_DJOB_HOSTFILE": _file, "LSB_MCPU_HOSTS": _pairs},
        command="jsrun python train.py",
        source="IBM Spectrum LSF, environment variables",
    ),
    JobEnvironment(
        name="OAR",
        hosts={"OAR_NODEFILE": _file},
        command="mpirun --hostfile $OAR_NODEFILE python train.py",
        source="OAR 2.5",
    ),
)
"""Environments with several hosts. Job arrays and indices of pods alone are none."""


def check_alone(env: Env) -> str:
    """Return a warning for a world of one if the job has other hosts; empty without any.

    One rule for all: where the environment starts the script on each host, each process would train
    alone, and this raises LaunchError. A batch system runs the script on the first host only, where it
    is a line; on another host of the job something else has started it, and this raises.
    """
    for job in JOB_ENVIRONMENTS:
        variable, hosts = job.found(env)
        count = hosts if isinstance(hosts, int) else len(hosts)
        if count < 2:
            continue
        if job.nodes is None and not _elsewhere(job, env, hosts):
            return f"one process in a job of {job.name} with {count} hosts: `{job.command}` uses all"
        raise LaunchError(
            given=spell(env, (variable,)),
            found=f"no launcher has started ranks, and this is one of {count} hosts ({job.name}): each "
            "would train alone",
            fix=f"{job.command}; if each process is to train alone: shoal.init(alone=True) or export "
            f"{ALONE}=1; outside of such a job: unset {variable}",
        )
    return ""


def _elsewhere(job: JobEnvironment, env: Env, hosts: int | list[str]) -> bool:
    """Return whether this is not the first host of a batch job, as far as names tell."""
    if job.elsewhere and integer(env, job.elsewhere, 0) > 0:
        return True
    if isinstance(hosts, int):
        return False
    here, *names = (name.partition(".")[0] for name in (socket.gethostname().lower(), *hosts))
    return here in names[1:] and here != names[0]


def read_nodes(env: Env) -> JobNodes | None:
    """Return the nodes of this process's job; None if the environment names none.

    Ranks of a launcher inherit the variables; for them it is None too. Raises LaunchError for variables
    that can't be read or contradict each other.
    """
    if env.get(ALONE) == "1" or env.get("LOCAL_RANK"):
        return None
    for job in JOB_ENVIRONMENTS:
        variable, hosts = ("", 1) if job.nodes is None else job.found(env)
        if job.nodes is None or not variable:
            continue
        count = hosts if isinstance(hosts, int) else len(hosts)
        index = job.nodes.index(env)
        reason = f"{job.name}: {spell(env, (variable,))}"
        if not 0 <= index < count:
            raise LaunchError(
                given=reason,
                found=f"the number of this node is {index}, of {count} node(s)",
                fix=_BY_HAND,
            )
        port = integer(env, job.nodes.port, PORT) if job.nodes.port else PORT
        address, port = _split_address(job.nodes.address(env), port)
        if not 1 <= port <= LAST_PORT:
            raise LaunchError(
                given=reason,
                found=f"port {port}; ports are numbers from 1 to {LAST_PORT}",
                fix=_BY_HAND,
            )
        processes = env.get(job.nodes.processes, "")
        return JobNodes(
            name=job.name,
            nodes=env[variable] if isinstance(hosts, int) else str(count),
            index=index,
            host=address,
            port=port,
            processes=int(processes) if processes.isdecimal() else 0,
            reason=reason,
        )
    return None
