"""Faults of the network between two nodes of a run: does it end like an undisturbed one?

    python benchmarks/chaos_network.py [--seeds 3] [--faults cut,lost] [--json]

Each node is a network namespace with one rank under `shoal run --nodes 2`. A fault begins after a step
that the seed draws. A node whose command ends with an error is started again, as by a scheduler. Needs
root and iproute2, and a C compiler for clocks; leaves nothing behind unless it is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.tools.chaos.final_state import digest_end

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from chaos_training import SCRIPT, count_samples, print_results  # noqa: E402
from helpers.clocks import WrongClock  # noqa: E402
from helpers.cluster.network import Network, ip  # noqa: E402

HOSTS = {"a": ("10.79.0.1/24",), "b": ("10.79.0.2/24",)}
LATER = "10.79.0.3"
NAME = "rendezvous"
NETNS = Path("/etc/netns")
EPOCHS = 20
FIRST, LAST = 10, 80
"""The steps after which faults begin."""
SECONDS = 8.0
"""For this long a link is cut; a node has left after 5 s without a sign of life."""
LIMIT = 900.0
MOST_STARTS = 6
WAIT = 60.0
"""A node waits for the other one for this long, and then its command fails."""
HEAD = ("fault", "runs", "first message", "median delay", "starts", "samples", "bit-identical ends")
_PAUSE = 0.05


@dataclass(frozen=True, kw_only=True)
class NetworkFault:
    """`switch` are options of the switch of all links; `begin` and `end` act on the network.

    `clock` is the offset that the wall clock of the second node gets, in seconds.
    """

    text: str
    switch: tuple[str, ...] = ()
    round_trip: float = 0.0
    begin: Callable[[Network], object] = lambda network: None
    end: Callable[[Network], object] = lambda network: None
    clock: int = 0


def signal_host(network: Network, host: str, signum: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to all processes of a host."""
    for process in network.processes(host):
        with suppress(psutil.Error):
            process.send_signal(signum)


def name_rendezvous(network: Network, address: str) -> None:
    """Let the name of the rendezvous be resolved to an address; `ip netns exec` mounts the files."""
    for host in HOSTS:
        folder = NETNS / network.space(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")


def rename(network: Network) -> None:
    """Give the node of the rendezvous another address under the same name, and kill the other node."""
    ip("-n", network.space("a"), "addr", "add", f"{LATER}/24", "dev", "eth0")
    name_rendezvous(network, LATER)
    signal_host(network, "b")


FAULTS = {
    "cut": NetworkFault(
        text=f"link cut both ways for {SECONDS:g} s",
        begin=lambda network: network.cut("b"),
        end=lambda network: network.mend("b"),
    ),
    "one-way": NetworkFault(
        text=f"TCP from one node to the other dropped for {SECONDS:g} s",
        begin=lambda network: network.drop("b", "1-65534", source="a"),
        end=lambda network: network.accept("b", "1-65534", source="a"),
    ),
    "narrow": NetworkFault(
        text=f"link narrowed to 64 kbit/s for {SECONDS:g} s",
        begin=lambda network: network.rate("64kbit"),
        end=lambda network: network.rate(None),
    ),
    "delay": NetworkFault(text="round trips of 100 ms", round_trip=0.1),
    "lost": NetworkFault(text="2 % of frames lost", switch=("--lose=0.02",)),
    "doubled": NetworkFault(text="10 % of frames sent twice", switch=("--double=0.1",)),
    "reordered": NetworkFault(text="10 % of frames 5 ms late", switch=("--reorder=0.1",)),
    "name": NetworkFault(
        text="the rendezvous gets another address, and the other node is killed", begin=rename
    ),
    "node": NetworkFault(text="a node killed", begin=lambda network: signal_host(network, "b")),
    "store": NetworkFault(
        text="the node of the store killed", begin=lambda network: signal_host(network, "a")
    ),
    "spot": NetworkFault(
        text="SIGTERM to all processes of a node, which starts again",
        begin=lambda network: signal_host(network, "b", signal.SIGTERM),
    ),
    "clock": NetworkFault(text="the wall clock of a node jumps an hour ahead", clock=3600),
    "clock-back": NetworkFault(text="the wall clock of a node jumps an hour back", clock=-3600),
}


@dataclass(frozen=True, kw_only=True)
class NetworkRun:
    """A training on two nodes: its end, the starts, and the first message after the fault."""

    digest: str
    samples: tuple[int, int]
    starts: int
    message: str
    delay: float | None
    problem: str


class Nodes:
    """The two nodes of a training in `home`."""

    def __init__(self, network: Network, home: Path, fault: NetworkFault | None) -> None:
        self._network, self._home = network, home
        self.clock = WrongClock(home, 0) if fault is not None and fault.clock else None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = 0

    def start(self, host: str) -> None:
        """Start the command on a host."""
        self.starts += 1
        command = [
            "ip",
            "netns",
            "exec",
            self._network.space(host),
            sys.executable,
            "-m",
            "shoal",
            "run",
        ]
        command += ["--nodes", "2", "-n", "1", "--rendezvous", f"{NAME}:29400", "--restarts", "5"]
        command += ["--wait", str(WAIT)]
        variables = self.clock.variables if self.clock is not None and host == "b" else {}
        with (self._home / f"output-{host}.txt").open("ab") as output:
            self._processes[host] = subprocess.Popen(
                [*command, str(SCRIPT), "--", "--epochs", str(EPOCHS)],
                cwd=self._home,
                env=os.environ | variables,
                stdout=output,
                stderr=output,
            )

    def restart_failed(self) -> bool:
        """Start the command again where it failed; return whether it has ended well.

        A node that failed at the very end, and starts again, would wait for the other one.
        """
        for host, process in self._processes.items():
            if process.poll() and self.starts < MOST_STARTS:
                self.start(host)
        return any(process.poll() == 0 for process in self._processes.values())

    def stop(self) -> None:
        """End all processes."""
        for host in HOSTS:
            signal_host(self._network, host)
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def messages(self) -> str:
        """Return the output without the progress lines."""
        texts = [file.read_text(errors="replace") for file in sorted(self._home.glob("output-*.txt"))]
        return "\n".join(line for line in "".join(texts).splitlines() if "· step" not in line)

    def step(self) -> int:
        """Return the number of steps that rank 0 has taken in all attempts."""
        file = self._home / "samples-0.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0


def run_training(fault: NetworkFault | None, seed: int, home: Path) -> NetworkRun:
    """Train on two nodes under a fault."""
    home.mkdir()
    network = Network(f"chaos-{secrets.token_hex(3)}", HOSTS)
    switch: subprocess.Popen[bytes] | None = None
    network.create()
    name_rendezvous(network, HOSTS["a"][0].partition("/")[0])
    nodes = Nodes(network, home, fault)
    try:
        if fault is not None and (fault.switch or fault.round_trip):
            network.plug(kernel=False)
            options = (*fault.switch, f"--seed={seed}")
            switch = subprocess.Popen(
                network.delay(fault.round_trip, *options), stdout=subprocess.DEVNULL
            )
        for host in HOSTS:
            nodes.start(host)
        return _watch(fault, random.Random(seed).randint(FIRST, LAST), nodes, network, home)
    finally:
        nodes.stop()
        if switch is not None:
            switch.kill()
            switch.wait()
        network.remove()
        for host in HOSTS:
            shutil.rmtree(NETNS / network.space(host))


def _watch(
    fault: NetworkFault | None, first: int, nodes: Nodes, network: Network, home: Path
) -> NetworkRun:
    until = time.monotonic() + LIMIT
    began: float | None = None
    over, before, message, delay = False, "", "", None
    while time.monotonic() < until:
        now = time.monotonic()
        if fault is not None and began is None and nodes.step() >= first:
            before, began = nodes.messages(), now
            fault.begin(network)
            if nodes.clock is not None:
                nodes.clock.set(fault.clock)
        if fault is not None and began is not None and not over and now > began + SECONDS:
            fault.end(network)
            over = True
        if began is not None and not message:
            new = [line for line in nodes.messages().splitlines() if line not in before]
            message, delay = (new[0], now - began) if new else ("", None)
        if nodes.restart_failed():
            break
        time.sleep(_PAUSE)
    else:
        return NetworkRun(
            digest="", samples=(0, 0), starts=nodes.starts, message=message, delay=delay, problem="late"
        )
    samples = count_samples(home, EPOCHS)
    return NetworkRun(
        digest=digest_end(home),
        samples=samples,
        starts=nodes.starts,
        message=message,
        delay=delay,
        problem="",
    )


def row(fault: NetworkFault, runs: Sequence[NetworkRun], calm: NetworkRun) -> tuple[str, ...]:
    """Return the row of a fault."""
    delays = sorted(run.delay for run in runs if run.delay is not None)
    said = [run.message for run in runs if run.message]
    return (
        fault.text,
        str(len(runs)),
        said[0][:90] if said else "none",
        f"{delays[len(delays) // 2]:.1f} s" if delays else "",
        str(sum(run.starts for run in runs)),
        str(sum(sum(run.samples) for run in runs)),
        f"{sum(run.digest == calm.digest for run in runs)} of {len(runs)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        calm = run_training(None, 0, Path(temporary, "calm"))
        if calm.problem:
            raise SystemExit("the training failed by itself")
        for name in options.faults.split(","):
            fault = FAULTS[name]
            runs = [
                run_training(fault, seed, Path(temporary, f"{name}-{seed}"))
                for seed in range(options.seeds)
            ]
            rows.append(row(fault, runs, calm))
            print(rows[-1], *(run.message for run in runs), sep="\n", flush=True)
    print_results(HEAD, rows, as_json=options.json)


if __name__ == "__main__":
    main()
