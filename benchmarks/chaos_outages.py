"""Faults of the network between two nodes of a run, or of its file server: does it end undisturbed?

    python benchmarks/chaos_outages.py --where network [--seeds 3] [--faults cut lost] [--json]
    python benchmarks/chaos_outages.py --where files [--seeds 3] [--faults hang outage] [--json]

network: each node is a network namespace with one rank under `shoal run --nodes 2`. Needs root and
iproute2, and a C compiler for clocks; leaves nothing behind unless it is killed.

files: the working directory of `shoal run` is on sshfs, a FUSE file system, whose server is
`sftp-server`: it is stopped with SIGSTOP and continued, or killed and mounted again. All of it is
inside new PID and mount namespaces, which end with the command. Needs root, sshfs and sftp-server.

A fault begins after a step that the seed draws. A command that fails is started again, as by a
scheduler.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from disturbed import CALM, EPOCHS, MOST_STARTS, SCRIPT, OutsideFault, OutsideRun, outside_row, watch
from harness import finish, parse, show, versions
from helpers.clocks import WrongClock
from helpers.cluster.network import Network, ip
from shoal.tools.chaos.containment import contain
from shoal.tools.chaos.storm import end_processes

HOSTS = {"a": ("10.79.0.1/24",), "b": ("10.79.0.2/24",)}
LATER = "10.79.0.3"
NAME = "rendezvous"
NETNS = Path("/etc/netns")
SERVER = "/usr/lib/openssh/sftp-server"
LIMIT = 900.0
WAIT = 60.0
"""A node waits for the other one for this long, and then its command fails."""
INSIDE = "SHOAL_CHAOS_FILES"
SHOAL_RUN = [sys.executable, "-m", "shoal", "run"]


class ShoalRuns:
    """Commands of `shoal run` in `home`, each with a prefix and environment variables."""

    def __init__(self, home: Path, output: Path) -> None:
        self.home, self._output = home, output
        self.starts = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, host: str) -> tuple[list[str], dict[str, str], Path]:
        """Return the command of a host, its variables and its directory."""
        raise NotImplementedError

    def start(self, host: str) -> None:
        """Start the command of a host."""
        self.starts += 1
        command, variables, folder = self.command(host)
        with (self._output / f"output-{host}.txt").open("ab") as output:
            self._processes[host] = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def restart_failed(self) -> bool:
        """Start commands that failed again; return whether one has ended well.

        A node that failed at the very end, and starts again, would wait for the other one.
        """
        for host, process in self._processes.items():
            if process.poll() and self.starts < MOST_STARTS:
                self.start(host)
        return any(process.poll() == 0 for process in self._processes.values())

    def messages(self) -> list[str]:
        """Return the lines of the output without the progress lines."""
        files = sorted(self._output.glob("output-*.txt"))
        lines = "".join(file.read_text(errors="replace") for file in files).splitlines()
        return [line for line in lines if "· step" not in line]

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Nodes(ShoalRuns):
    """The two nodes of a training."""

    def __init__(self, network: Network, home: Path, fault: OutsideFault) -> None:
        super().__init__(home, home)
        self.network = network
        self.clock = WrongClock(home, 0) if fault.clock else None

    def command(self, host: str) -> tuple[list[str], dict[str, str], Path]:
        command = [*f"ip netns exec {self.network.space(host)}".split(), *SHOAL_RUN]
        command += [*f"--nodes 2 -n 1 --rendezvous {NAME}:29400 --restarts 5 --wait {WAIT}".split()]
        command += [str(SCRIPT), "--", "--epochs", str(EPOCHS)]
        variables = self.clock.variables if self.clock is not None and host == "b" else {}
        return command, variables, self.home

    def signal_host(self, host: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes of a host."""
        for process in self.network.processes(host):
            with suppress(psutil.Error):
                process.send_signal(signum)

    def name_rendezvous(self, address: str) -> None:
        """Let the rendezvous be resolved to an address; `ip netns exec` mounts the files."""
        for host in HOSTS:
            folder = NETNS / self.network.space(host)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def rename(self) -> None:
        """Give the node of the rendezvous another address under its name, and kill the other node."""
        ip("-n", self.network.space("a"), "addr", "add", f"{LATER}/24", "dev", "eth0")
        self.name_rendezvous(LATER)
        self.signal_host("b")

    def jump(self, seconds: int) -> None:
        """Let the wall clock of the second node jump."""
        assert self.clock is not None
        self.clock.set(seconds)


PORTS = "1-65534"
NETWORK_FAULTS = {
    "cut": OutsideFault(
        text="link cut both ways for 8 s",
        begin=lambda nodes: nodes.network.cut("b"),
        end=lambda nodes: nodes.network.mend("b"),
    ),
    "one-way": OutsideFault(
        text="TCP from one node to the other dropped for 8 s",
        begin=lambda nodes: nodes.network.drop("b", PORTS, source="a"),
        end=lambda nodes: nodes.network.accept("b", PORTS, source="a"),
    ),
    "narrow": OutsideFault(
        text="link narrowed to 64 kbit/s for 8 s",
        begin=lambda nodes: nodes.network.rate("64kbit"),
        end=lambda nodes: nodes.network.rate(None),
    ),
    "delay": OutsideFault(text="round trips of 100 ms", round_trip=0.1),
    "lost": OutsideFault(text="2 % of frames lost", switch=("--lose=0.02",)),
    "doubled": OutsideFault(text="10 % of frames sent twice", switch=("--double=0.1",)),
    "reordered": OutsideFault(text="10 % of frames 5 ms late", switch=("--reorder=0.1",)),
    "name": OutsideFault(
        text="the rendezvous gets another address, and the other node is killed", begin=Nodes.rename
    ),
    "node": OutsideFault(text="a node killed", begin=lambda nodes: nodes.signal_host("b")),
    "store": OutsideFault(
        text="the node of the store killed", begin=lambda nodes: nodes.signal_host("a")
    ),
    "spot": OutsideFault(
        text="SIGTERM to all processes of a node, which starts again",
        begin=lambda nodes: nodes.signal_host("b", signal.SIGTERM),
    ),
    "clock": OutsideFault(
        text="the wall clock of a node jumps an hour ahead",
        clock=3600,
        begin=lambda nodes: nodes.jump(3600),
    ),
    "clock-back": OutsideFault(
        text="the wall clock of a node jumps an hour back",
        clock=-3600,
        begin=lambda nodes: nodes.jump(-3600),
    ),
}


@contextmanager
def two_nodes(fault: OutsideFault, seed: int, home: Path) -> Iterator[ShoalRuns]:
    """Start a training on two nodes."""
    home.mkdir()
    network = Network(f"chaos-{secrets.token_hex(3)}", HOSTS)
    switch: subprocess.Popen[bytes] | None = None
    network.create()
    nodes = Nodes(network, home, fault)
    nodes.name_rendezvous(HOSTS["a"][0].partition("/")[0])
    try:
        if fault.switch or fault.round_trip:
            network.plug(kernel=False)
            command = network.delay(fault.round_trip, *fault.switch, f"--seed={seed}")
            switch = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for host in HOSTS:
            nodes.start(host)
        yield nodes
    finally:
        for host in HOSTS:
            nodes.signal_host(host)
        nodes.stop()
        if switch is not None:
            switch.kill()
            switch.wait()
        network.remove()
        for host in HOSTS:
            shutil.rmtree(NETNS / network.space(host))


class ServedRun(ShoalRuns):
    """A training in a directory that `sftp-server` serves and sshfs mounts."""

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(folder / "served", folder)
        self._mounted, self._timeout = folder / "mounted", timeout
        self.home.mkdir(parents=True)
        self._mounted.mkdir()
        self.mount()

    def command(self, host: str) -> tuple[list[str], dict[str, str], Path]:
        script = [str(SCRIPT), "--", "--epochs", str(EPOCHS), "--timeout", str(self._timeout)]
        return [*SHOAL_RUN, "-n", "2", "--restarts", "2", *script], {}, self._mounted

    def mount(self) -> None:
        """Start the server, connected to sshfs by two pipes, and wait for the mount."""
        (to_server, requests), (answers, to_client) = os.pipe(), os.pipe()
        self.server = subprocess.Popen([SERVER], stdin=to_server, stdout=to_client)
        options = ["-f", "-o", "passive", f":{self.home}", str(self._mounted)]
        self._client = subprocess.Popen(["sshfs", *options], stdin=answers, stdout=requests)
        for end in (to_server, requests, answers, to_client):
            os.close(end)
        while not self._mounted.is_mount():
            if self._client.poll() is not None:
                raise SystemExit("sshfs did not mount")
            time.sleep(0.01)

    def mount_again(self) -> None:
        self.server.wait()
        self.unmount()
        self.mount()

    def unmount(self) -> None:
        """Remove the mount, unless it has ended with its server; processes that use it get errors."""
        subprocess.run(["umount", "--lazy", str(self._mounted)], check=False, capture_output=True)
        self._client.wait()


HANGING: dict[str, Any] = {
    "begin": lambda served: served.server.send_signal(signal.SIGSTOP),
    "end": lambda served: served.server.send_signal(signal.SIGCONT),
}
FILE_FAULTS = {
    "hang": OutsideFault(text="file server hangs for 20 s", seconds=20.0, **HANGING),
    "outage": OutsideFault(
        text="file server hangs for 45 s, the script's timeout is 15 s",
        seconds=45.0,
        timeout=15.0,
        **HANGING,
    ),
    "dead": OutsideFault(
        text="file server killed, and mounted again after 5 s",
        seconds=5.0,
        begin=lambda served: served.server.kill(),
        end=lambda served: served.mount_again(),
    ),
}


@contextmanager
def served(fault: OutsideFault, seed: int, folder: Path) -> Iterator[ShoalRuns]:
    """Start a training on a file server."""
    run = ServedRun(folder, fault.timeout)
    run.start("server")
    yield run
    run.stop()
    run.unmount()


PLACES: dict[str, tuple[Callable[..., Any], dict[str, OutsideFault]]] = {
    "network": (two_nodes, NETWORK_FAULTS),
    "files": (served, FILE_FAULTS),
}


def run_faults(where: str, names: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Return the row of each fault."""
    start, faults = PLACES[where]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:

        def run(name: str, seed: int) -> OutsideRun:
            fault = faults.get(name, CALM)
            with start(fault, seed, Path(temporary, f"{name}-{seed}")) as commands:
                return watch(commands, fault, seed, LIMIT)

        calm = run("calm", 0)
        if not calm.digest:
            raise SystemExit("the training failed by itself")
        for name in names or faults:
            runs = [run(name, seed) for seed in range(seeds)]
            rows.append(outside_row(faults[name], runs, calm))
            print(rows[-1], *(f"{each.delay} {each.message}" for each in runs), sep="\n", flush=True)
        if where == "files":
            end_processes()
    return rows


def main() -> None:
    given = parse(__doc__, where=tuple(PLACES), seeds=3, faults=[""])
    if given.where == "files" and INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        raise SystemExit(subprocess.call(contain([sys.executable, *sys.argv])))
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = run_faults(given.where, [*filter(None, given.faults)], given.seeds)
    show(versions("shoal", "torch"), rows)
    finish(given, {given.where: rows})


if __name__ == "__main__":
    main()
