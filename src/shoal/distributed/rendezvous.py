"""The rendezvous of a job's ranks if no launcher gave them an address and a port.

Rank 0 takes the first free port of the job's list and answers every connection with the name of the job
and the port of the store. The others ask at each host and port in turn and skip those that answer
differently, such as another job or an older attempt of this one. So no rank has to know which port was
free, and two jobs on one machine can't be mixed up.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from shoal.distributed.cluster_env import DIRECTORY, PORTS, Meeting, Placement
from shoal.distributed.outages import Probes, address_towards
from shoal.distributed.passing_faults import RENDEZVOUS, note_cause
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, raised_as
from shoal.util.regular_file import appearing, write_new

LONGEST = 300.0
"""Longest time in seconds for which ranks look for rank 0, the same as in torch's own stores."""

SILENCE = 10.0
"""After this many seconds without a reply from any host, the network is at fault: a host on which rank
0 is not ready yet replies that no process listens.
"""

_MOST_CALLED = 64
"""Largest number of other machines that rank 0 calls if ranks are missing."""
_NAMED = 3
_ANSWER_SECONDS = 2.0
_CALLERS = 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_HERE = "shoal/rank/{rank}"


def meet(meeting: Meeting, *, rank: int, size: int, timeout: float) -> TCPStore:
    """Return the store of a job after all its ranks have joined; rank 0 opens it, the others find it.

    Raises LaunchError if rank 0 finds no free port or not all other ranks, or if another rank does not
    find rank 0.
    """
    limit = min(timeout, LONGEST)
    if rank:
        host, port = _find(meeting, rank, CLOCK.now() + limit)
        store = _store(host, port, size, limit)
        store.set(_HERE.format(rank=rank), "here")
        return store
    with _listen(meeting, meeting.ports) as server:
        store = _open_store(meeting, server, size, limit)
        line = f"{meeting.job} {store.port}\n".encode()
        # The job's other machines, each by its name with an address and a port to call.
        machines = {host: (host, meeting.ports[0]) for host in meeting.others[:_MOST_CALLED]}
        with answering(server, line), _published(meeting, server.getsockname()[1]):
            await_all(store, size, CLOCK.now() + limit, machines=machines)
    return store


@contextmanager
def answering(server: socket.socket, line: bytes, then: bytes = b"") -> Iterator[None]:
    """Send every caller at `server` the same line and disconnect, within the block.

    `then` follows in separate packets, as large as the network takes them.
    """
    thread = threading.Thread(target=_answer, args=(server, line, then), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()


def _answer(server: socket.socket, line: bytes, then: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller, suppress(OSError):
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.sendall(line)
            caller.sendall(then)


def await_all(
    store: Store,
    size: int,
    deadline: float,
    *,
    key: str = _HERE,
    machines: Mapping[str, tuple[str, int]] | None = None,
) -> None:
    """Wait, on rank 0, for the key of each other rank.

    Raises LaunchError with the missing ranks, or with those of `machines` that answer no call. Each
    machine is given by its name with an address and a port.
    """
    missing = list(range(1, size))
    pause, begun = _FIRST_PAUSE, CLOCK.now()
    calls: Probes | None = None
    with ExitStack() as stack:
        while True:
            missing = [rank for rank in missing if not store.check([key.format(rank=rank)])]
            if not missing:
                return
            now = CLOCK.now()
            if now + pause > deadline:
                raise _not_come(missing, size, calls)
            if machines and calls is None and now > begun + min(SILENCE, (deadline - begun) / 2):
                calls = stack.enter_context(Probes(machines))
            CLOCK.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _not_come(missing: Sequence[int], size: int, calls: Probes | None) -> LaunchError:
    here = socket.gethostname()
    names = ", ".join(map(str, missing[:5])) + ", …" * (len(missing) > 5)
    dead = [one for one in calls.outages() if not one.over] if calls else []
    given = f"a world of {size}, whose rank 0 is on {here}"
    if not dead:
        late = LaunchError(
            given=given,
            found=f"rank {names} did not join the rendezvous",
            fix="check that the launcher started every rank, and read the missing rank's error message",
        )
        return note_cause(late, RENDEZVOUS)
    silent = "; ".join(f"{one.host} does not answer {here}: {one}" for one in dead[:_NAMED])
    more = f"; {len(dead) - _NAMED} more machines do not answer" if dead[_NAMED:] else ""
    return LaunchError(
        given=given,
        found=f"{silent}{more}; missing: rank {names}",
        fix=f"check the link between {here} and {dead[0].host} (ping {dead[0].host}; ip -s link), "
        f"or leave that machine out (sbatch --exclude={dead[0].host})",
    )


def variables_of_tasks(placement: Placement, store: Store | None, host: str) -> dict[str, str]:
    """Return the variables that `idr_torch`, the module of Jean Zay, sets and reads. Collective.

    A launcher without a port gets one that is free now on rank 0, whose address is `host` there: for a
    store of the script's own. Empty without a store.
    """
    if store is None:
        return {}
    address, port = placement.address, str(placement.port)
    if placement.meeting is not None:
        if placement.rank == 0:
            with _listen(placement.meeting, (*placement.meeting.ports, 0)) as server:
                store.set("master", f"{host} {server.getsockname()[1]}")
        address, port = store.get("master").decode().split()
    variables = {"MASTER_ADDR": address, "MASTER_PORT": port}
    if placement.launcher == "srun":
        variables["SLURM_CPUS_PER_TASK"] = str(placement.cores)
    return variables


def _listen(meeting: Meeting, ports: Iterable[int]) -> socket.socket:
    """Return a socket at the first free port, of the loopback only if all ranks are on this machine.

    Otherwise it listens on all interfaces, since the one that the others will use is not known.
    """
    for port in ports:
        try:
            return listen(port, "127.0.0.1" if meeting.hosts == ("127.0.0.1",) else "")
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise _no_port(meeting)


def listen(port: int, address: str = "") -> socket.socket:
    """Return a socket that listens at an address of this machine, or at all; port 0: a free one."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_CALLERS)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_CALLERS, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_CALLERS)


def _open_store(meeting: Meeting, server: socket.socket, size: int, limit: float) -> TCPStore:
    # From the end of the list: callers try its start first, and a store would make them wait.
    taken = server.getsockname()[1]
    own = _listen(meeting, [port for port in (*reversed(meeting.ports), 0) if port != taken])
    # By default, torch's store would always listen on all interfaces.
    return _store("127.0.0.1", own.getsockname()[1], size, limit, listens=own.detach())


def _no_port(meeting: Meeting) -> LaunchError:
    ports = ", ".join(map(str, meeting.ports))
    return LaunchError(
        given=f"rank 0 on {socket.gethostname()}, which may listen at port {ports}",
        found="in use" if len(meeting.ports) == 1 else "all of them are in use",
        fix=f"export MASTER_PORT=N with a free port N (ss -ltn lists those in use), or {PORTS}",
    )


def _store(host: str, port: int, size: int, limit: float, *, listens: int | None = None) -> TCPStore:
    return TCPStore(
        host,
        port,
        size,
        is_master=listens is not None,
        timeout=timedelta(seconds=limit),
        wait_for_workers=False,
        master_listen_fd=listens,
    )


class _UnreachableError(OSError):
    """An error for a host that sent no reply at all."""


def _find(meeting: Meeting, rank: int, deadline: float) -> tuple[str, int]:
    """Return the host and the port of this job's store."""
    pause, why, first = _FIRST_PAUSE, "rank 0 has not published its address", 0
    answered = CLOCK.now()
    while True:
        silent = not meeting.directory  # hosts that are guessed may be silent
        for host, ports in [(host, meeting.ports) for host in meeting.hosts] + _read(meeting):
            # A network that drops calls costs seconds for each: one per round, then the next port.
            start = first % len(ports)
            for port in (*ports[start:], *ports[:start]):
                try:
                    return host, _ask(meeting.job, host, port)
                except (OSError, ValueError) as error:
                    why = f"{host}:{port}: {error}"
                    if isinstance(error, _UnreachableError):
                        break
                    silent = False
        now = CLOCK.now()
        if silent and now > answered + SILENCE:
            raise _unreachable(meeting, rank, now - answered, why)
        first, answered = (first + 1, answered) if silent else (0, now)
        if now + pause > deadline:
            late = LaunchError(
                given=f"rank {rank} on {socket.gethostname()} looked for rank 0 of {meeting.job} "
                f"at {_where(meeting)}",
                found=f"rank 0 was not found; last error: {why}",
                fix="check that every rank was started and that hosts reach each other, or export "
                "MASTER_ADDR and MASTER_PORT (host and free port of rank 0)"
                + (f", or {DIRECTORY} (a directory that all hosts share)" * bool(meeting.directory)),
            )
            raise note_cause(late, RENDEZVOUS)
        CLOCK.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _unreachable(meeting: Meeting, rank: int, seconds: float, why: str) -> LaunchError:
    here, there = socket.gethostname(), ", ".join(meeting.hosts)
    return LaunchError(
        given=f"rank {rank} on {here} looked for rank 0 of {meeting.job} at {_where(meeting)}",
        found=f"{here} can't reach {there}: no reply in {seconds:.0f} s; last error: {why}",
        fix="let the hosts of a job connect to each other at these ports, or export "
        f"{PORTS}=FIRST-LAST with ports at which they may; if rank 0 is not on {there}, or other hosts "
        "cannot reach that network, export MASTER_ADDR=ADDRESS",
    )


def _ask(job: str, host: str, port: int) -> int:
    """Return the port of the store of `job`, if rank 0 of that job answers."""
    try:
        call = socket.create_connection((host, port), timeout=_ANSWER_SECONDS)
    except (TimeoutError, socket.gaierror) as error:
        raise _UnreachableError(str(error)) from None
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            raise _UnreachableError(str(error)) from None
        raise
    with call, call.makefile("rb") as answer:
        line = answer.readline(1000).decode(errors="replace")
    name, _, number = line.strip().rpartition(" ")
    if name != job:
        raise ValueError("another program answers at this address")
    return int(number)


def _where(meeting: Meeting) -> str:
    hosts = [*meeting.hosts, *([str(_file(meeting))] if meeting.directory else [])]
    return f"{', '.join(hosts)}; ports {', '.join(map(str, meeting.ports))}"


def _file(meeting: Meeting) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in meeting.job)
    return Path(meeting.directory).expanduser() / name


@contextmanager
def _published(meeting: Meeting, port: int) -> Iterator[None]:
    """Publish rank 0's address in the shared directory while the others may look for it."""
    if not meeting.directory:
        yield
        return
    path = _file(meeting)
    with raised_as(
        LaunchError,
        given=f"rank 0 publishes its address in {path.parent}",
        fix=f"export {DIRECTORY}=DIR (shared by all hosts), or MASTER_ADDR and MASTER_PORT",
    ):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # only the user may list it
        with appearing(path) as partial:
            write_new(partial, "".join(f"{host} {port}\n" for host in own_addresses()), private=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read(meeting: Meeting) -> list[tuple[str, tuple[int, ...]]]:
    if not meeting.directory:
        return []
    try:
        lines = _file(meeting).read_text().splitlines()
        return [(host, (int(port),)) for host, port in (line.split() for line in lines)]
    except (OSError, ValueError):
        return []


def own_addresses() -> list[str]:
    """Return the addresses by which other machines may call this one: of its default route, and its
    name.
    """
    routed = address_towards(("192.0.2.1", 9))  # of RFC 5737: by the default route
    return [*filter(None, (routed,)), socket.gethostname()]
