"""Environments that name the hosts of a job, and start a script there without a launcher of ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed.placement import spell
from shoal.util.errors import LaunchError

ALONE = "SHOAL_ALONE"
"""Set to 1: the same as `shoal.init(alone=True)`."""

_EACH = "if each process is to train alone: shoal.init(alone=True), or export SHOAL_ALONE=1"


@dataclass(frozen=True, kw_only=True)
class HostMark:
    """An environment by which a script can know that it runs on one of several hosts.

    `variables` tell, one of them is enough. `hosts` returns the hosts in the value of one, or their
    number. `command` starts all ranks if it is run where the script was. With `batch`, the script of a
    job runs on the first host only.
    """

    name: str
    variables: tuple[str, ...]
    hosts: Callable[[str], int | list[str]]
    command: str
    source: str
    batch: bool = False

    def found(self, env: Mapping[str, str]) -> tuple[str, int | list[str]]:
        """Return the variable that tells and the hosts, or their number; 1 if none can be read."""
        for name in self.variables:
            if env.get(name):
                with suppress(ValueError, OSError):
                    return name, self.hosts(env[name])
        return "", 1


def _most(text: str) -> int:
    return int(text.rpartition(":")[2])


def _json(text: str) -> list[str]:
    return list(dict.fromkeys(map(str, json.loads(text))))


def _file(text: str) -> list[str]:
    """Return the hosts of a file with a line for each slot, or one for each host and then its slots."""
    lines = Path(text).read_text().splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def _pairs(text: str) -> list[str]:
    return list(dict.fromkeys(text.split()[::2]))


_TORCHRUN = "torchrun --nproc-per-node=gpu --nnodes={} --node-rank={} --master-addr={} train.py"

MARKS = (
    HostMark(
        name="Kubeflow Trainer",
        variables=("PET_NNODES",),
        hosts=_most,
        command="torchrun train.py",
        source="kubeflow/trainer, API 2.3",
    ),
    HostMark(
        name="SkyPilot",
        variables=("SKYPILOT_NUM_NODES",),
        hosts=int,
        command=_TORCHRUN.format(
            "$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK", '$(head -n1 <<< "$SKYPILOT_NODE_IPS")'
        ),
        source="SkyPilot 0.14, documentation",
    ),
    HostMark(
        name="dstack",
        variables=("DSTACK_NODES_NUM",),
        hosts=int,
        command=_TORCHRUN.format(
            "$DSTACK_NODES_NUM", "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"
        ),
        source="dstack 0.22, documentation",
    ),
    HostMark(
        name="LeaderWorkerSet",
        variables=("LWS_GROUP_SIZE",),
        hosts=int,
        command=_TORCHRUN.format("$LWS_GROUP_SIZE", "$LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS"),
        source="LeaderWorkerSet 1.0",
    ),
    HostMark(
        name="AWS Batch",
        variables=("AWS_BATCH_JOB_NUM_NODES",),
        hosts=int,
        command=_TORCHRUN.format(
            "$AWS_BATCH_JOB_NUM_NODES",
            "$AWS_BATCH_JOB_NODE_INDEX",
            "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -I | cut -d' ' -f1)}",
        ),
        source="AWS Batch, environment variables of multi-node parallel jobs",
    ),
    HostMark(
        name="SageMaker",
        variables=("SM_HOSTS",),
        hosts=_json,
        command="the torch_distributed option of the estimator's distribution",
        source="SageMaker training toolkit, ENVIRONMENT_VARIABLES.md",
    ),
    HostMark(
        name="Volcano",
        variables=("VC_WORKER_NUM",),
        hosts=int,
        command="its pytorch plugin, which sets RANK and WORLD_SIZE",
        source="Volcano, job plugins",
    ),
    HostMark(
        name="HTCondor",
        variables=("_CONDOR_NPROCS",),
        hosts=int,
        command="",
        source="HTCondor, parallel universe",
    ),
    HostMark(
        name="PBS",
        variables=("PBS_NODEFILE", "PBS_NUM_NODES"),
        hosts=lambda text: int(text) if text.isdecimal() else _file(text),
        command="mpiexec python train.py",
        source="qsub(1B)",
        batch=True,
    ),
    HostMark(
        name="Grid Engine",
        variables=("PE_HOSTFILE", "NHOSTS"),
        hosts=lambda text: int(text) if text.isdecimal() else _file(text),
        command="mpiexec python train.py",
        source="qsub(1) of Grid Engine 8.1",
        batch=True,
    ),
    HostMark(
        name="LSF",
        variables=("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"),
        hosts=lambda text: _file(text) if "/" in text else _pairs(text),
        command="jsrun python train.py",
        source="IBM Spectrum LSF, environment variables",
        batch=True,
    ),
    HostMark(
        name="OAR",
        variables=("OAR_NODEFILE",),
        hosts=_file,
        command="mpirun --hostfile $OAR_NODEFILE python train.py",
        source="OAR 2.5",
        batch=True,
    ),
)
"""Environments with several hosts. Job arrays and indices of pods alone are none."""


def check_alone(env: Mapping[str, str]) -> str:
    """Return a warning for a world of one if the job has other hosts; empty without any.

    One rule for all: where the environment starts the script on each host, each process would train
    alone, and this raises LaunchError. So it does on all hosts but the first where the script of a batch
    job runs on the first only: something has started it there too. On the first one, it is a line.
    """
    for mark in MARKS:
        variable, hosts = mark.found(env)
        count = hosts if isinstance(hosts, int) else len(hosts)
        if count < 2:
            continue
        here = socket.gethostname().partition(".")[0]
        elsewhere = not isinstance(hosts, int) and here != hosts[0].partition(".")[0]
        if mark.batch and not elsewhere:
            return f"one process in a job of {mark.name} with {count} hosts: `{mark.command}` starts them"
        raise LaunchError(
            given=spell(env, (variable,)),
            found=f"no launcher has started ranks, and this is one of {count} hosts ({mark.name}): each "
            "process would train alone",
            fix=f"{mark.command}; {_EACH}" if mark.command else _EACH,
        )
    return ""
