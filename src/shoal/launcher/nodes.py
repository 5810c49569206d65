"""Several machines for one run: how many, where they meet, how long they wait for each other."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.distributed.cluster_env import Placement
from shoal.util.errors import LaunchError

WAIT = 600.0
"""Seconds for which a node waits until enough are there."""

SILENCE = 5.0
"""Seconds without a sign of life after which a node has left."""

_EXAMPLE = "shoal run --nodes 2:4 --rendezvous HOST:29400 -n 4 script.py"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run: `least` to `most` of them, met at `host` and `port`.

    Each runs the same command. `wait` is how many seconds a node waits for others, `silence` after
    how many without a sign of life one has left. `job` is what all of them must have in common, by
    name: who differs is another job that came here by chance.
    """

    least: int
    most: int
    host: str
    port: int
    wait: float = WAIT
    silence: float = SILENCE
    job: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The numbers as they are typed."""
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"

    @property
    def address(self) -> str:
        """Where they meet, as it is typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def choose_nodes(
    nodes: str,
    rendezvous: str | None,
    placement: Placement,
    job: Mapping[str, str],
    *,
    wait: float = WAIT,
    silence: float = SILENCE,
) -> Nodes | None:
    """What `--nodes` and `--rendezvous` say; None for one machine.

    Without `--rendezvous` the machines meet on the first one that the scheduler listed, where
    `placement` is that of this launcher as a task of a job. Raises LaunchError.
    """
    least, most = parse_numbers(nodes)
    if most == 1:
        return None
    for option, value, low in (("--wait", wait, 1.0), ("--silence", silence, 2.0)):
        if not low <= value <= 86400.0:
            raise LaunchError(
                given=f"{option} {value:g}",
                found=f"it is a number of seconds, {low:g} to 86400",
                fix=f"{option} {WAIT if option == '--wait' else SILENCE:g}, which is the default",
            )
    meeting = placement.meeting
    common = dict(job)
    if meeting is not None:
        common["job"] = meeting.job
    if rendezvous is not None:
        host, port = parse_address(rendezvous)
    elif meeting is not None and placement.address:
        host, port = placement.address, placement.port
    else:
        raise LaunchError(
            given=f"--nodes {nodes}",
            found="not where the nodes meet, and no scheduler that lists them",
            fix=f"give all of them the same address of one of them, with a free port: {_EXAMPLE}",
        )
    return Nodes(least=least, most=most, host=host, port=port, wait=wait, silence=silence, job=common)


def parse_numbers(text: str) -> tuple[int, int]:
    """Read `2:4`, or `2` for as many and no other number. Raises LaunchError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        found = "it is a number of nodes, or the least and the most"
    else:
        least, most = int(match[1]), int(match[2] or match[1])
        if 1 <= least <= most:
            return least, most
        found = (
            "at least one node" if least < 1 else f"the least, {least}, is more than the most, {most}"
        )
    raise LaunchError(given=f"--nodes {text}", found=found, fix="for example --nodes 2, or --nodes 2:4")


def parse_address(text: str) -> tuple[str, int]:
    """Read `HOST:PORT` or `[IPV6]:PORT`. Raises LaunchError."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]+)):(\d+)", text.strip())
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise LaunchError(
            given=f"--rendezvous {text}",
            found="not a host and a port from 1 to 65535",
            fix="for example --rendezvous node01:29400",
        )
    return match[1] or match[2], int(match[3])


def describe_script(
    path: str, command: str, *, nodes: str, restarts: int, preemptions: int
) -> dict[str, str]:
    """What the launchers of one run have in common: compared when they meet."""
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "--nodes": nodes,
        "--restarts": str(restarts),
        "--preemptions": str(preemptions),
        "command": command,
        "content of the script": content[:12],
    }


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What two launchers that met do not have in common, in words; empty if all is the same."""
    return "; ".join(
        f"{name} {theirs.get(name, 'not given')} there, {ours.get(name, 'not given')} here"
        for name in dict.fromkeys([*theirs, *ours])
        if ours.get(name) != theirs.get(name)
    )


def label() -> str:
    """How this node is called in messages; several may share a machine."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def listen(host: str, port: int) -> socket.socket | str:
    """A socket that listens at `host` alone (port 0: a free one), or why there can't be one.

    A name that means a loopback address only here (`127.0.1.1` in /etc/hosts) is listened for on
    all interfaces, because others know it by another address.
    Raises LaunchError where the name means nothing.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            given=f"--rendezvous {host}:{port}",
            found=f"{host} is not known here ({error})",
            fix="give the name or the address of one of the nodes, as all of them know it",
        ) from None
    family, _, _, _, address = found[0]
    named_here = str(address[0]).startswith("127.") and host not in ("localhost", address[0])
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("" if named_here else str(address[0]), port))
        server.listen(1024)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{host} is no address of {socket.gethostname()}"
        return f"port {port}: {error.strerror}"
    return server


def way_to(host: str, port: int) -> str:
    """The address by which this machine reaches `host`, and others reach this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses a way.
        probe.connect(address)
        return str(probe.getsockname()[0])
