"""Several machines for one run: their number, the rendezvous, and the time limits."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.distributed.cluster_env import Placement
from shoal.distributed.cluster_env.job_environments import ALONE, JobNodes
from shoal.distributed.outages import address_towards
from shoal.util.arguments import check_number
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

WAIT = 600.0
"""Seconds for which a node waits until there are enough nodes."""

SILENCE = 5.0
"""Seconds without a sign of life after which a node has left."""

_PAUSE = 0.5
_EXAMPLE = "shoal run --nodes 2:4 --rendezvous HOST:29400 -n 4 script.py"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run: `least` to `most` of them, with the rendezvous at `host` and `port`.

    Each runs the same command. A node waits `wait` seconds for others, and has left after `silence`
    seconds without a sign of life. `job` has the facts that must be equal on all nodes, by name; a node
    that differs belongs to another job that reached this address by chance. Ranks follow the `index` of
    their nodes; without one, it is 0 on all of them. The name `host` may be unknown for `unknown`
    seconds.
    """

    least: int
    most: int
    host: str
    port: int
    wait: float = WAIT
    silence: float = SILENCE
    index: int = 0
    job: Mapping[str, str] = field(default_factory=dict)
    unknown: float = 0.0

    @property
    def text(self) -> str:
        """The numbers of nodes as typed."""
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"

    @property
    def address(self) -> str:
        """The address of the rendezvous as typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def choose_nodes(
    nodes: str,
    rendezvous: str | None,
    placement: Placement | None,
    job: Mapping[str, str],
    *,
    there: JobNodes | None = None,
    wait: float = WAIT,
    silence: float = SILENCE,
) -> Nodes | None:
    """Return the nodes from `--nodes` and `--rendezvous`; None for one machine.

    Without `--rendezvous`, the address is that of `there`, the nodes in the environment of this job, or
    the first machine in the scheduler's list. `placement` is that of this launcher as a task of a job.
    Raises LaunchError.
    """
    least, most = parse_numbers(nodes)
    if most == 1:
        return None
    check_number(LaunchError, "shoal run", "--wait", wait, 1.0, most=86400.0, usual=WAIT)
    check_number(LaunchError, "shoal run", "--silence", silence, 2.0, most=86400.0, usual=SILENCE)
    common = dict(job)
    unknown = 0.0
    meeting = None if placement is None else placement.meeting
    if meeting is not None:
        common["job"] = meeting.job
    if rendezvous is not None:
        host, port = parse_address(rendezvous)
    elif placement is not None and meeting is not None and placement.address:
        host, port = placement.address, placement.port
    elif there is not None and there.host:
        host, port, unknown = there.host, there.port, wait
    else:
        raise LaunchError(
            given=f"--nodes {nodes}" if there is None else there.reason,
            found="no rendezvous address, and no scheduler that lists the nodes",
            fix=f"use the same address of one node, with a free port, on all nodes: {_EXAMPLE}",
        )
    index = 0 if there is None else there.index
    return Nodes(
        least=least,
        most=most,
        host=host,
        port=port,
        wait=wait,
        silence=silence,
        index=index,
        job=common,
        unknown=unknown,
    )


def choose_numbers(nodes: str | None, there: JobNodes | None) -> str | None:
    """Return `--nodes`, or the number in the environment of the job; None if neither is given.

    Raises LaunchError if the command would leave nodes of the job to themselves, or wait for others.
    """
    if there is None:
        return nodes
    most = parse_numbers(there.nodes)[1]
    if nodes is None:
        return there.nodes if most > 1 else None
    given = parse_numbers(nodes)[1]
    if given != most:
        raise LaunchError(
            given=f"--nodes {nodes}; {there.reason}",
            found=f"each of {most} node(s) of this job runs this command"
            + (", and would wait for more" if given > most else ", and some would train apart"),
            fix=f"leave --nodes out, or pass --nodes {most} or --nodes 1:{most}; to train on this node "
            f"alone: export {ALONE}=1",
        )
    return nodes


def choose_processes(there: JobNodes) -> int:
    """Return the processes of one node of a job: as its environment says, or one per GPU, or 1."""
    if there.processes:
        return there.processes
    from shoal.util import accelerator

    return max(1, accelerator.count())


def parse_numbers(text: str) -> tuple[int, int]:
    """Return the limits in `2:4`, or in `2` for exactly that number. Raises LaunchError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        found = "the value is a number of nodes, or MIN:MAX"
    else:
        least, most = int(match[1]), int(match[2] or match[1])
        if 1 <= least <= most:
            return least, most
        found = (
            "a run needs at least one node"
            if least < 1
            else f"the minimum, {least}, is above the maximum, {most}"
        )
    raise LaunchError(given=f"--nodes {text}", found=found, fix="pass --nodes 2, or --nodes 2:4")


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port in `HOST:PORT` or `[IPV6]:PORT`. Raises LaunchError."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]+)):(\d+)", text.strip())
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise LaunchError(
            given=f"--rendezvous {text}",
            found="it is not a host and a port from 1 to 65535",
            fix="pass --rendezvous node01:29400",
        )
    return match[1] or match[2], int(match[3])


def describe_script(
    path: str, command: str, *, nodes: str, restarts: int, preemptions: int
) -> dict[str, str]:
    """Return the facts that are compared at the rendezvous between the launchers of one run."""
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
    """Return the differences between the facts of two launchers as text; empty if there are none."""
    return "; ".join(
        f"{name} {theirs.get(name, 'not given')} there, {ours.get(name, 'not given')} here"
        for name in dict.fromkeys([*theirs, *ours])
        if ours.get(name) != theirs.get(name)
    )


def label() -> str:
    """Return this node's name in messages; several nodes may be on one machine."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def _resolve(host: str, port: int, wait: float) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the address of a name, which may be unknown for `wait` seconds.

    Kubernetes adds the names of pods some seconds after their start, and removes them with the pods.
    Raises LaunchError.
    """
    deadline, told = CLOCK.now() + wait, False
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            if CLOCK.now() >= deadline or isinstance(error, UnicodeError):
                raise LaunchError(
                    given=f"a rendezvous at {host}:{port}",
                    found=f"the name {host} can't be resolved ({error})",
                    fix="use the name or the address of one of the nodes, as all of them know it, for "
                    "--rendezvous; in a cloud, check the service of the job",
                ) from None
            if not told:
                told = True
                text = f"shoal run: waiting up to {wait:g} s until the name {host} can be resolved"
                print(text, file=sys.stderr, flush=True)
            CLOCK.sleep(_PAUSE)
        else:
            return family, address


def listen(host: str, *ports: int, unknown: float = 0.0) -> socket.socket | str:
    """Return a socket that listens at `host` only, on the first free port, or why there is none.

    Port 0 is any free one. If the name means a loopback address on this machine only (`127.0.1.1` in
    /etc/hosts), the socket listens on all interfaces, because other machines know the name by another
    address. Raises LaunchError for a name that stays unknown for `unknown` seconds.
    """
    family, address = _resolve(host, ports[0], unknown)
    named_here = str(address[0]).startswith("127.") and host not in ("localhost", address[0])
    why = ""
    for port in ports:
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("" if named_here else str(address[0]), port))
            server.listen(1024)
        except OSError as error:
            server.close()
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{host} is not an address of {socket.gethostname()}"
            why = f"port {port}: {error.strerror}"
        else:
            return server
    return (
        why if len(ports) == 1 else f"none of {len(ports)} ports is free; the last one tried is {why}"
    )


def why_silent(host: str, port: int) -> str:
    """Return why a rendezvous has not answered: it can't be reached, or is silent."""
    try:
        socket.create_connection((host, port), timeout=SILENCE).close()
    except OSError as error:
        return str(error)
    return "the program that listens there does not answer"


def way_to(nodes: Nodes) -> str:
    """Return the address by which this machine reaches the rendezvous, and others this machine."""
    return address_towards(_resolve(nodes.host, nodes.port, nodes.unknown)[1])
