"""Detection of machines that do not answer: a short call every half second, with the time of each
failure.

A call counts as answered if the other machine's kernel replies, even if no process listens at that
port. This distinguishes a process that hangs, is stopped or has ended from a dead link.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from shoal.util.clock import CLOCK, local_time

LEAST_SECONDS = 2.0
"""A shorter span is not an outage: a lost packet is retransmitted within it."""

_LEAST_CALLS = 2
"""A process that gets no CPU time makes no calls, and detects no outage either."""
_CALL_SECONDS = 1.0
_PAUSE = 0.5
_SILENT = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT)
# A call that is closed this way leaves no socket that waits for late packets.
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(kw_only=True)
class Outage:
    """A span of time in which a machine answered no call.

    `began` is the time of its last answer, or of the first call if it has not `answered` before, in
    seconds since the epoch. `over` is True if it has answered since. `calls` had no answer, the last
    one for the reason `why`. `interface` is the one of this machine that leads to `address`; empty if
    there is none.
    """

    host: str
    address: str
    port: int
    interface: str = ""
    began: float = field(default_factory=CLOCK.wall)
    seconds: float = 0.0
    calls: int = 0
    why: str = ""
    answered: bool = False
    over: bool = False

    def __str__(self) -> str:
        by = f" by {self.interface}" if self.interface else ""
        since = local_time(self.began, "%H:%M:%S")
        last = f"the last answer came at {since}" if self.answered else f"none came since {since}"
        return (
            f"{self.calls} calls to {self.address}, port {self.port},{by} had no reply "
            f"for {self.seconds:.0f} s ({last}; {self.why})"
        )


class Probes:
    """Repeated calls to machines within a block, each given by its name with an address and a port."""

    def __init__(self, machines: Mapping[str, tuple[str, int]]) -> None:
        self._machines = machines
        self._lines: dict[str, Outage] = {}
        self._begun: dict[str, float] = {}
        self._past: list[Outage] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Probes:
        for host, (address, port) in self._machines.items():
            line = Outage(host=host, address=address, port=port)
            self._begun[host] = CLOCK.now()
            self._lines[host] = line
            threading.Thread(target=self._watch, args=(line,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def outages(self) -> list[Outage]:
        """Return all outages so far, those that are over first."""
        with self._lock:
            return [*self._past, *(one for line in self._lines.values() for one in self._silent(line))]

    def _silent(self, line: Outage, *, over: bool = False) -> list[Outage]:
        """Return the outage since the last answer, if it is one."""
        seconds = CLOCK.now() - self._begun[line.host]
        lasting = line.calls >= _LEAST_CALLS and seconds >= LEAST_SECONDS
        return [replace(line, seconds=seconds, over=over)] if lasting else []

    def _watch(self, line: Outage) -> None:
        while not self._over.is_set():
            with suppress(socket.gaierror):  # an unknown name says nothing about the network
                address = socket.getaddrinfo(line.address, line.port, type=socket.SOCK_STREAM)[0]
                line.interface = _interface_to(address[4]) or line.interface
                why = _call(address[0], address[4])
                with self._lock:
                    self._note(line, why)
            CLOCK.wait(self._over, _PAUSE)

    def _note(self, line: Outage, why: str) -> None:
        if why:
            line.calls, line.why = line.calls + 1, why
            return
        self._past += self._silent(line, over=True)
        self._begun[line.host], line.began = CLOCK.now(), CLOCK.wall()
        line.answered, line.calls = True, 0


def _call(family: int, address: tuple[object, ...]) -> str:
    """Return the reason why an address did not reply; empty if it did."""
    with socket.socket(family, socket.SOCK_STREAM) as call:
        call.settimeout(_CALL_SECONDS)
        try:
            call.connect(address)
            call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        except TimeoutError:
            return "timed out"
        except OSError as error:
            return (error.strerror or str(error)) if error.errno in _SILENT else ""
    return ""


def address_towards(address: tuple[object, ...]) -> str:
    """Return the address from which this machine calls another one; empty if there is no route."""
    family = socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # No packet is sent: connecting a datagram socket only selects a route.
        probe.connect(address)
        return str(probe.getsockname()[0])
    return ""


def _interface_to(address: tuple[object, ...]) -> str:
    """Return this machine's interface for packets to an address; empty if there is none."""
    own = address_towards(address)
    for name, known in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in known):
            return name
    return ""
