"""A real Slurm cluster on one machine: each node is a slurmd in namespaces of its own.

A node has its own network, host name, processes, mounts and shared memory, and a cable to a switch
that has a namespace too; no address is added to the machine's network. Needs root, slurmctld,
slurmd, munged and iproute2. `python tests/cluster/slurm.py` starts one with a shell on its login
node, and ends it with the shell.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
_NETWORK = "10.77.0"
_SECONDS = 100.0
_PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")

# The first process of a node's namespaces. It outlives the daemon, whose tasks may outlive it.
_INIT = """
hostname "$2"; mount --make-rprivate /
mount --bind "$1/hosts" /etc/hosts; mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs /dev/shm
[ -d "$1/pmix" ] && mount --bind "$1/pmix" "$3"
shift 3; "$@" & while :; do wait; sleep 1; done
"""

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
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
MailProg=/bin/true
GresTypes=gpu
NodeName=node[01-{nodes:02d}] NodeAddr={network}.[11-{last}] CPUs=8 RealMemory=4096 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """What this machine lacks for a cluster, in words; empty if nothing."""
    if os.geteuid():
        return "needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return "needs namespaces: " + done.stderr.decode().strip() if done.returncode else ""


class Cluster:
    """A cluster with `nodes` nodes, node01 …, and a login node, ctl; gone after the `with` block."""

    def __init__(self, folder: Path, *, nodes: int = 4) -> None:
        self.folder = folder
        self.nodes = [f"node{number:02d}" for number in range(1, nodes + 1)]
        self._prefix = f"s{secrets.token_hex(3)}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._write()
            self._connect()
            munge = self.folder / "munge"
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
            files |= {"log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={munge / name}" for option, name in files.items()]
            self._spawn("munged", ["munged", "--foreground", "--force", *options])
            _wait_for((munge / "socket").exists, "munged")
            conf = str(self.folder / "slurm.conf")
            self._start("ctl", ["slurmctld", "-D", "-c", "-f", conf])
            for node in self.nodes:
                self._start(node, ["slurmd", "-D", "-f", conf])
            _wait_for(self._is_idle, "the nodes")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node to its end."""
        return subprocess.run(
            [*self._inside("ctl", folder or self.folder), *command],
            env={**_clean(), **(variables or {}), "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    def close(self) -> None:
        """Kill all processes of all nodes, and remove the networks."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                # `unshare --kill-child` takes the node's first process with it, and that one all.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()
        for name in (*self.nodes, "ctl", "switch"):
            subprocess.run(["ip", "netns", "del", self._net(name)], capture_output=True, check=False)

    def _write(self) -> None:
        for name in ("state", "munge", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        numbered = list(enumerate(self.nodes, 11))
        hosts = ["127.0.0.1 localhost", f"{_NETWORK}.1 ctl"]
        hosts += [f"{_NETWORK}.{number} {node}" for number, node in numbered]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self.folder / "nsswitch.conf").write_text(_SWITCH)
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for number in range(8):
            os.mknod(self.folder / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))
        text = _CONF.format(
            folder=self.folder, network=_NETWORK, nodes=len(self.nodes), last=numbered[-1][0]
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-7]\n"
        )
        # A node's /sys has no cgroups, and its /tmp is the machine's.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        if _PMIX.is_dir():
            # Slurm's plugin opens a name that only the development package has.
            shutil.copytree(_PMIX, self.folder / "pmix", symlinks=True)
            with suppress(FileExistsError):
                (self.folder / "pmix/libpmix.so").symlink_to("libpmix.so.2")

    def _net(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _connect(self) -> None:
        switch = self._net("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in [(1, "ctl"), *enumerate(self.nodes, 11)]:
            net = self._net(name)
            _ip("netns", "add", net)
            _ip("-n", net, "link", "set", "lo", "up")
            _ip(*f"-n {net} link add eth0 type veth peer name v{name} netns {switch}".split())
            _ip("-n", net, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
            _ip("-n", net, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"v{name}", "master", "br0", "up")

    def _start(self, name: str, daemon: list[str]) -> None:
        init = ["sh", "-c", _INIT, "init", str(self.folder), name, str(_PMIX), *daemon]
        namespaces = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._spawn(name, ["ip", "netns", "exec", self._net(name), *namespaces, *init])

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**_clean(), "SLURM_CONF": str(self.folder / "slurm.conf")},
                start_new_session=True,
            )

    def _inside(self, name: str, folder: Path) -> list[str]:
        outer = self._processes[name].pid
        inner = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", "--target", inner, *spaces, f"--wdns={folder}", "--"]

    def _is_idle(self) -> bool:
        with suppress(IndexError, OSError):
            done = self.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%n"])
            return sorted(done.stdout.split()) == self.nodes
        return False


def _clean() -> dict[str, str]:
    """The environment without what started the tests, or tells them where modules are."""
    dropped = ("SLURM", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {_SECONDS:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, Cluster(Path(temporary) / "cluster") as cluster:
        shell = [*cluster._inside("ctl", Path.cwd()), "bash"]
        subprocess.run(
            shell, env={**_clean(), "SLURM_CONF": str(cluster.folder / "slurm.conf")}, check=False
        )
        sys.exit(0)
