"""The nodes of a cluster on one machine: each is the daemon of a scheduler in namespaces of its own.

A node has its own network, host name, processes, mounts and shared memory, and a cable to a switch
that has a namespace too; no address is added to the machine's network, and several clusters can be
up at once. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from helpers.cluster import files
from helpers.cluster.network import Network

_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_SECONDS = 200.0
_STATE = "cluster.json"
_DELAY = "delay"

# The first process of a node's namespaces. It outlives the daemon, whose tasks may outlive it.
_INIT = """
hostname "$2"; mount --make-rprivate /
mount --bind "$1/hosts-$2" /etc/hosts; mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs /dev/shm
{mounts}
shift 2; "$@" & while :; do wait; sleep 1; done
"""


def missing_programs(*daemons: str) -> str:
    """What this machine lacks for a cluster with these daemons, in words; empty if nothing."""
    if os.geteuid():
        return "needs root"
    lacking = [name for name in (*daemons, *_PROGRAMS) if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return "needs namespaces: " + done.stderr.decode().strip() if done.returncode else ""


class NodeCluster:
    """A cluster with `nodes` nodes, node01 …, and a login node, ctl; gone after the `with` block.

    A scheduler's cluster starts its daemons in `_begin`.
    """

    mounts = ""
    """Shell commands of the first process of a node, in its own mount namespace; `$1` is the folder."""

    @property
    def variables(self) -> dict[str, str]:
        """Variables by which the scheduler's commands find the cluster."""
        raise NotImplementedError

    @property
    def daemon(self) -> Sequence[str]:
        """The command of the daemon of a node, which stays in the foreground."""
        raise NotImplementedError

    def queue(self) -> str:
        """The jobs that have not ended, as the scheduler lists them."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Make the network and the files, and start all daemons."""
        raise NotImplementedError

    def _idle(self) -> set[str]:
        """The nodes that are there and have nothing to do."""
        raise NotImplementedError

    def __init__(self, folder: Path, *, nodes: int, prefix: str | None) -> None:
        self.folder = folder
        self.nodes = [f"node{number:02d}" for number in range(1, nodes + 1)]
        self._prefix = prefix or f"s{secrets.token_hex(3)}"
        numbers = files.numbered(self.nodes)
        hosts = {name: files.addresses(number) for name, number in numbers.items()}
        self.network = Network(self._prefix, hosts)
        self._processes: dict[str, psutil.Process] = {}

    @classmethod
    def find(cls, folder: Path) -> Self:
        """The cluster that another process has started in `folder`."""
        state = json.loads((folder / _STATE).read_text())
        cluster = cls(folder, nodes=state["nodes"], prefix=state["prefix"])
        for name, (pid, born) in state["processes"].items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == born:
                    cluster._processes[name] = process
        return cluster

    def __enter__(self) -> Self:
        try:
            self._begin()
            self.wait_idle()
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
            self.inside("ctl", command, folder),
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on the login node, with one pipe for stdout and stderr."""
        return subprocess.Popen(
            self.inside("ctl", command, folder),
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def inside(self, name: str, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """The command that runs `command` on a node, or on ctl."""
        outer = self._processes[name].pid
        inner = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        enter = ["nsenter", "--target", inner, *spaces, f"--wdns={folder or self.folder}", "--"]
        return [*enter, *command]

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of commands: without what started the tests, or says where modules are."""
        dropped = ("SLURM", "SGE_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "NCCL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return {**kept, **(variables or {}), **self.variables}

    def name_hosts(self, *, own: str = "", version: int = 4) -> None:
        """Write the hosts files: addresses of IP `version`; `own`, if given, for a host's own name.

        Debian's own is 127.0.1.1.
        """
        chosen = {4: 0, 6: 1}[version]
        known = {name: at[chosen].partition("/")[0] for name, at in self.network.hosts.items()}
        files.write_hosts(self.folder, known, own=own)

    def delay(self, round_trip: float) -> None:
        """Let a frame and its answer take so many seconds between any two nodes; 0: what it takes."""
        before = self._processes.pop(_DELAY, None)
        if before is not None:
            _end(before)
        self.network.plug(kernel=not round_trip)
        if round_trip:
            said = self._spawn(_DELAY, self.network.delay(round_trip))
            wait_for(lambda: "ready" in said.read_text(), _DELAY)
        self._remember()

    def kill(self, node: str) -> None:
        """Kill a node: all its processes at once, and without a word to others, as by its power."""
        self.network.cut(node)
        _end(self._processes.pop(node))
        self._remember()

    def revive(self, node: str) -> None:
        """Start a node, the first time or after it was killed."""
        self.network.mend(node)
        self._start(node, self.daemon)

    def kill_program(self, node: str, name: str) -> None:
        """Kill a program of a node alone, such as its daemon; what it has started goes on."""
        for process in self.network.processes(node):
            if process.name() == name:
                process.kill()

    def running(self, node: str, text: str) -> list[psutil.Process]:
        """The processes of a node with `text` in their command line."""
        found = []
        for process in self.network.processes(node):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_idle(self, *nodes: str) -> None:
        """Wait until these nodes, or all of them, are there and have nothing to do."""
        wanted = set(nodes or self.nodes)
        wait_for(lambda: wanted <= self._idle(), f"of the nodes {', '.join(sorted(wanted))}, some")

    def close(self) -> None:
        """Kill all processes of all nodes, and remove the networks."""
        for process in self._processes.values():
            _end(process)
        self._processes.clear()
        self.network.remove()

    def _start(self, name: str, daemon: Sequence[str]) -> None:
        script = _INIT.format(mounts=self.mounts)
        init = ["sh", "-c", script, "init", str(self.folder), name, *daemon]
        namespaces = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._spawn(name, ["ip", "netns", "exec", self.network.space(name), *namespaces, *init])

    def _spawn(self, name: str, command: list[str]) -> Path:
        """Start a process that the cluster consists of; the file of what it says."""
        path = self.folder / f"{name}.out"
        with path.open("wb") as out:
            self._processes[name] = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
                start_new_session=True,
            )
        self._remember()
        return path

    def _remember(self) -> None:
        state = {
            "nodes": len(self.nodes),
            "prefix": self._prefix,
            "processes": {n: (p.pid, p.create_time()) for n, p in self._processes.items()},
        }
        (self.folder / _STATE).write_text(json.dumps(state))


def _end(process: psutil.Process) -> None:
    """Kill a process of the cluster, and its session: `unshare --kill-child` takes a node along."""
    if process.is_running():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        process.wait(timeout=_SECONDS)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until `what` is up; raises TimeoutError."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {_SECONDS:.0f} s")
        time.sleep(0.05)
