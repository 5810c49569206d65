"""A network of its own on this machine: hosts that are namespaces, each on a cable to one switch.

No address is added to the machine's network, and any number of such networks can be up at once.
Needs root and iproute2. Cables can be narrowed, delayed and cut, and a host can drop what comes in.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

DELAY = Path(__file__).with_name("delay.py")
_SWITCH = "switch"
# As large as what a token bucket of 1 Gbit/s fills in 2 ms, which is how exact kernels' timers are.
_BUCKET = "burst 256k latency 50ms"


class Network:
    """Hosts by name, each with its addresses (`10.77.0.11/24`); up from `create` to `remove`."""

    def __init__(self, prefix: str, hosts: Mapping[str, tuple[str, ...]]) -> None:
        self._prefix = prefix
        self.hosts = dict(hosts)

    def space(self, host: str) -> str:
        """The network namespace of a host, as `ip netns` knows it."""
        return f"{self._prefix}-{host}"

    def create(self) -> None:
        """Make the switch, and connect all hosts to it."""
        switch = self.space(_SWITCH)
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        ip("-n", switch, "link", "set", "br0", "up")
        for host, addresses in self.hosts.items():
            space = self.space(host)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip(*f"-n {space} link add eth0 type veth peer name v{host} netns {switch}".split())
            for address in addresses:
                # Without duplicate detection an IPv6 address can be used at once.
                known = ["nodad"] if ":" in address else []
                ip("-n", space, "addr", "add", address, "dev", "eth0", *known)
            ip("-n", space, "link", "set", "eth0", "up")
            for family in ("-4", "-6"):
                # What comes to the host itself is looked up first of all, so that nothing else
                # could be said about it: a little later leaves room for `drop`.
                ip(family, "-n", space, "rule", "add", "pref", "10", "lookup", "local")
                ip(family, "-n", space, "rule", "del", "pref", "0", "lookup", "local")
            ip("-n", switch, "link", "set", f"v{host}", "master", "br0", "up")

    def remove(self) -> None:
        """Remove all of it. What still runs in a namespace keeps that without a network."""
        for host in (*self.hosts, _SWITCH):
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True, check=False)

    def rate(self, rate: str | None) -> None:
        """Let every cable carry so much in each direction, as tc spells it: `200mbit`; None: all."""
        for host in self.hosts:
            for space, device in ((self.space(host), "eth0"), (self.space(_SWITCH), f"v{host}")):
                if rate is None:
                    with suppress(subprocess.CalledProcessError):  # there was no limit
                        _tc(space, "del", "dev", device, "root")
                else:
                    _tc(space, *f"replace dev {device} root tbf rate {rate} {_BUCKET}".split())

    def narrow(self, host: str, other: str, rate: str | None) -> None:
        """Let only so much through from a host to one other, as tc spells it; None: all.

        Kernels without classes of traffic have devices on top of another: one for this way alone.
        """
        space, name = self.space(host), f"to-{other}"
        if rate is None:
            ip("-n", space, "link", "del", "dev", name)
            return
        (own, there) = (self.hosts[one][0].partition("/")[0] for one in (host, other))
        ip(*f"-n {space} link add link eth0 name {name} type macvlan mode bridge".split())
        ip(*f"-n {space} link set dev {name} up".split())
        _tc(space, *f"add dev {name} root tbf rate {rate} {_BUCKET}".split())
        ip(*f"-n {space} route add {there} dev {name} src {own}".split())

    def delay(self, round_trip: float, *faults: str) -> list[str]:
        """The command that delays all frames for as long as it runs: `round_trip` in seconds.

        `faults` are options of delay.py, such as `--lose=0.01`.
        """
        enter = ["ip", "netns", "exec", self.space(_SWITCH), sys.executable, str(DELAY)]
        return [*enter, str(round_trip / 2), *(f"v{host}" for host in self.hosts), *faults]

    def plug(self, *, kernel: bool) -> None:
        """Plug all cables into the kernel's switch, or unplug them for a command that is one."""
        for host in self.hosts:
            where = ["master", "br0"] if kernel else ["nomaster"]
            ip("-n", self.space(_SWITCH), "link", "set", f"v{host}", *where)

    def cut(self, host: str) -> None:
        """Cut the cable of a host."""
        ip("-n", self.space(_SWITCH), "link", "set", f"v{host}", "down")

    def shrink(self, host: str, mtu: int) -> None:
        """Let the switch lose, without a word, what is larger than `mtu` on the cable of a host."""
        for name in self.hosts:
            # Segments that a card would cut are passed on whole by a switch of the kernel.
            ip("-n", self.space(name), "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self.space(_SWITCH), "link", "set", f"v{host}", "mtu", str(mtu))

    def mend(self, host: str) -> None:
        """Mend the cable of a host."""
        ip("-n", self.space(_SWITCH), "link", "set", f"v{host}", "up")

    def drop(self, host: str, ports: str, *, source: str) -> None:
        """Let a host drop, without an answer, what another sends to its TCP ports (`1-1023`)."""
        for address in self.hosts[source]:
            self._rule("add", host, ports, address)

    def accept(self, host: str, ports: str, *, source: str) -> None:
        """Undo `drop`."""
        for address in self.hosts[source]:
            self._rule("del", host, ports, address)

    def _rule(self, action: str, host: str, ports: str, source: str) -> None:
        rule = f"pref 1 from {source.partition('/')[0]} iif eth0 ipproto tcp dport {ports} blackhole"
        family = "-6" if ":" in source else "-4"
        ip(family, "-n", self.space(host), "rule", action, *rule.split())

    def processes(self, host: str) -> list[psutil.Process]:
        """All processes of a host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.space(host)], capture_output=True, text=True, check=True
        )
        found = []
        for pid in done.stdout.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found


def ip(*arguments: str) -> None:
    """Run ip(8); its complaint is the error's."""
    _run("ip", *arguments)


def _tc(space: str, *arguments: str) -> None:
    _run("tc", "-n", space, "qdisc", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
