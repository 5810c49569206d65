"""The files of a Slurm cluster whose nodes are namespaces: its configuration, keys and hosts."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NETWORK, NETWORK_6 = "10.77.0", "fd77:"
"""How addresses begin; the login node has number 1, nodes those from 11 on."""

PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
GPUS = 8

# Names are looked up in the hosts file alone: reverse look-ups would wait for a name server.
_SWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"

_CONF = """
ClusterName=mini
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
JobRequeue=1
SlurmdTimeout={silence}
MessageTimeout=5
KillWait=5
MailProg=/bin/true
GresTypes=gpu
{settings}
NodeName=DEFAULT CPUs=8 RealMemory=4096 Gres=gpu:{gpus} Feature=a100
NodeName=node[01-{nodes:02d}] NodeAddr={network}.[11-{last}]
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def numbered(nodes: Sequence[str]) -> dict[str, int]:
    """The number of each machine in the network."""
    return {"ctl": 1, **{node: number for number, node in enumerate(nodes, 11)}}


def addresses(number: int) -> tuple[str, ...]:
    """The addresses of a machine, with their networks."""
    return f"{NETWORK}.{number}/24", f"{NETWORK_6}:{number}/64"


def write_switch(folder: Path) -> None:
    """Write the file by which machines look up names, and let all users read the folder."""
    folder.chmod(0o755)
    (folder / "nsswitch.conf").write_text(_SWITCH)


def write(folder: Path, nodes: Sequence[str], *, silence: int, settings: str) -> None:
    """Write all that the daemons of a cluster read, but for the hosts files.

    After `silence` seconds without an answer a node counts as down. `settings` are more lines of
    slurm.conf, above the nodes and the partition `main`.
    """
    for name in ("state", "munge", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    write_switch(folder)
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))
    last = numbered(nodes)[nodes[-1]]
    text = _CONF.format(
        folder=folder,
        network=NETWORK,
        nodes=len(nodes),
        last=last,
        gpus=GPUS,
        silence=silence,
        settings=settings,
    )
    (folder / "slurm.conf").write_text(text)
    gpus = f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gpus)
    # A node's /sys has no cgroups, and its /tmp is the machine's.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
    if PMIX.is_dir():
        # Slurm's plugin opens a name that only the development package has.
        shutil.copytree(PMIX, folder / "pmix", symlinks=True)
        with suppress(FileExistsError):
            (folder / "pmix/libpmix.so").symlink_to("libpmix.so.2")


def write_hosts(folder: Path, known: Mapping[str, str], *, own: str = "") -> None:
    """Write the hosts file of each machine: names and their addresses, or `own` for its own name.

    In place, since each is mounted over a machine's /etc/hosts.
    """
    for machine in known:
        there = {**known, machine: own or known[machine]}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in there.items())]
        (folder / f"hosts-{machine}").write_text("\n".join(lines) + "\n")
