"""Links carry as much as they were told to, as fast, and nothing when they are cut."""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.cluster.network import Network
from helpers.cluster.slurm import missing
from helpers.commands import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.realtime,
    pytest.mark.timeout(300),
]

HOSTS = {name: (f"10.78.0.{n}/24", f"fd78::{n}/64") for n, name in enumerate("abc", 1)}
PORT = 5000

# Before all else on this machine, where that can be had: what is measured is the link.
FIRST = """
import os
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except OSError:
    pass
"""

# Takes all that comes; of each caller, as it hangs up, the bytes per second after the first million.
SERVER = """
import socket, threading, time
def take(call):
    buffer, count, begun, past = bytearray(1 << 20), 0, 0.0, 0
    while size := call.recv_into(buffer):
        count += size
        if not begun and count > 1e6:
            begun, past = time.perf_counter(), count
    if begun:
        print((count - past) / (time.perf_counter() - begun), flush=True)
server = socket.create_server(("", 5000), family=socket.AF_INET6, dualstack_ipv6=True)
print("ready", flush=True)
while True:
    threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()
"""

SEND = """
import socket, sys
call = socket.create_connection((sys.argv[1], 5000), timeout=10)
call.settimeout(None)
for _ in range(int(sys.argv[2])):
    call.sendall(bytes(1 << 20))
"""

# How long it takes to connect: one frame there, one back, and no process in between.
CONNECT = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for _ in range(int(sys.argv[2])):
    with socket.socket(family) as call:
        call.settimeout(1)
        begun = time.perf_counter()
        call.connect((sys.argv[1], 5000))
        print(time.perf_counter() - begun)
"""


def address(host: str, version: int = 4) -> str:
    return HOSTS[host][version == 6].partition("/")[0]


class Links(Network):
    """Three hosts, with a server on b."""

    def on(self, host: str, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter(host), sys.executable, "-c", FIRST + code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def enter(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(host)]

    def round_trip(self, version: int = 4) -> float:
        """Seconds from a to b and back."""
        done = self.on("a", CONNECT, address("b", version), 21)
        assert done.returncode == 0, done.stderr
        return statistics.median(map(float, done.stdout.split()))

    def connects(self, host: str) -> bool:
        return self.on(host, CONNECT, address("b"), 1).returncode == 0


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that says when it is ready."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    if missing():
        pytest.skip(missing())
    links = Links(f"l{secrets.token_hex(3)}", HOSTS)
    try:
        links.create()
        yield links
    finally:
        links.remove()


@pytest.fixture(scope="module")
def server(links: Links) -> Iterator[subprocess.Popen[str]]:
    with running([*links.enter("b"), sys.executable, "-c", FIRST + SERVER]) as process:
        yield process


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("200mbit", 2e8)])
def test_bandwidth(rate: str, bits: float, links: Links, server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    found = 0.0
    links.rate(rate)
    try:
        for _ in range(5):  # one that something else held up says nothing of the link
            sent = links.on("a", SEND, address("b"), round(bits / 8 / 2**20))
            assert sent.returncode == 0, sent.stderr
            found = max(found, 8 * float(server.stdout.readline()))
            if found > 0.9 * bits:  # of each 1514 bytes on the cable, TCP carries 1448
                break
    finally:
        links.rate(None)
    assert found == pytest.approx(bits, rel=0.1)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("version", [4, 6])
def test_latency(version: int, links: Links) -> None:
    before = links.round_trip(version)
    links.plug(kernel=False)
    try:
        with running(links.delay(0.004)):
            delayed = links.round_trip(version)
    finally:
        links.plug(kernel=True)
    assert delayed == pytest.approx(0.004, rel=0.1)
    assert before < 0.001 > links.round_trip(version)


@pytest.mark.usefixtures("server")
def test_a_cut_cable_carries_nothing_until_it_is_mended(links: Links) -> None:
    assert links.connects("a")
    links.cut("b")
    assert not links.connects("a")
    links.mend("b")
    wait_for(lambda: links.connects("a"))


@pytest.mark.usefixtures("server")
def test_a_host_drops_what_it_is_told_to_from_whom_it_is_told_to(links: Links) -> None:
    links.drop("b", f"{PORT - 1}-{PORT + 1}", source="a")
    try:
        assert not links.connects("a")
        assert links.connects("c")
    finally:
        links.accept("b", f"{PORT - 1}-{PORT + 1}", source="a")
    assert links.connects("a")


@pytest.mark.usefixtures("server")
def test_a_switch_loses_doubles_and_reorders_frames(links: Links) -> None:
    links.plug(kernel=False)
    try:
        with running(links.delay(0.0, "--lose=1")):
            assert not links.connects("a")
        with running(links.delay(0.0, "--lose=0.1", "--double=0.5", "--reorder=0.5")):
            assert links.on("a", SEND, address("b"), 1).returncode == 0
    finally:
        links.plug(kernel=True)
