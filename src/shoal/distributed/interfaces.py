"""Choice of the network interface between the ranks of several machines, by trying all.

By default, backends guess: Gloo takes the address of the host's own name, which is 127.0.1.1 on Debian.
So rank 0 offers its interfaces, each rank connects to it by each of them, and Shoal takes the fastest
by which all ranks have connected. A failure to connect is thus found within seconds, with the names of
both hosts, and not by a backend in the middle of another operation.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]

from shoal.distributed.env_vars import GLOO, NCCL
from shoal.distributed.rendezvous import answering, await_all, listen
from shoal.util.clock import CLOCK
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

CALL_SECONDS = 3.0
"""Seconds for which a rank tries to reach rank 0 by one address."""

_FULL = bytes(12 << 10)
"""Fills packets of every usual size, including jumbo frames of 9,000 bytes."""
_LATE_SECONDS = 0.3
"""Seconds for which a rank waits for the other interfaces after it has connected by one."""
_INFINIBAND = 32
_UNKNOWN = 1000
"""The speed assumed for an interface of unknown speed: virtual machines report none, tunnels 10."""
_OFFER, _REPORT, _DECISION = "network/offer", "network/report/{rank}", "network/decision"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of a machine: its addresses, and its speed in Mbit/s (0: unknown)."""

    name: str
    addresses: tuple[str, ...]
    speed: int = 0
    infiniband: bool = False

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can use it."""
        return all(ipaddress.ip_address(each).is_loopback for each in self.addresses)


@dataclass(frozen=True, kw_only=True)
class InterfaceReport:
    """Results of one rank's calls to rank 0's interfaces: its own address in each, or the error."""

    host: str
    reached: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class ChosenInterface:
    """The interface chosen for this rank, and its address there."""

    choice: Decision[str]
    address: str


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine that are up and have an address others could call."""
    stats = psutil.net_if_stats()
    found = []
    for name, known in psutil.net_if_addrs().items():
        usable = [one for one in known if one.family in (socket.AF_INET, socket.AF_INET6)]
        # Link-local addresses need the name of the link, which differs between machines.
        addresses = [one.address for one in usable if "%" not in one.address]
        if addresses and name in stats and stats[name].isup:
            kind = 0
            with suppress(OSError, ValueError):
                kind = int(Path(f"/sys/class/net/{name}/type").read_text())
            found.append(
                Interface(
                    name=name,
                    addresses=tuple(addresses),
                    speed=stats[name].speed,
                    infiniband=kind == _INFINIBAND,
                )
            )
    return found


def machine() -> str:
    """Return an identifier of this machine; processes with the same one share a loopback interface.

    Pods and containers on one machine have networks of their own.
    """
    boot, space = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {space}"


def engine_variables(name: str, backend: str) -> dict[str, str]:
    """Return the variables that make a backend use this interface."""
    # Gloo always, for tensors on the CPU. NCCL, and RCCL by the same variable, take any
    # interface whose name begins with the value, unless `=` marks it as the full name.
    return {GLOO: name, **({NCCL: f"={name}"} if "nccl" in backend else {})}


def check_given(given: str) -> None:
    """Raise LaunchError if this machine has no interface of the name in GLOO_SOCKET_IFNAME."""
    error = _lacking(given, interfaces(), socket.gethostname()) if given else None
    if error is not None:
        raise error


def agree(store: Store, *, rank: int, size: int, given: str, timeout: float) -> ChosenInterface:
    """Return the interface by which all ranks reach rank 0; `given` is GLOO_SOCKET_IFNAME, if set.

    Collective, over a store that all ranks have. Raises LaunchError on all ranks if there is none, or
    if the given one is missing or does not reach rank 0.
    """
    mine, host = interfaces(), socket.gethostname()
    lacking = _lacking(given, mine, host) if given else None
    named = given.split(",")
    chosen = [one for one in mine if one.name in named] if given else mine
    if rank == 0:
        decision = _host(store, size, chosen, host, lacking, CLOCK.now() + timeout)
        store.set(_DECISION, json.dumps(decision))
        report = InterfaceReport(host=host, reached={one.name: one.addresses[0] for one in mine})
    else:
        offer = json.loads(store.get(_OFFER))
        if lacking is None:
            report = _call(offer, host, mine, chosen if given else [])
        else:
            report = InterfaceReport(host=host, error=lacking.texts)
        store.set(_REPORT.format(rank=rank), json.dumps(asdict(report)))
        decision = json.loads(store.get(_DECISION))
    if "error" in decision:
        raise LaunchError(**decision["error"])
    address = report.reached[decision["name"]]
    names = [one.name for one in mine if address in one.addresses]
    name = names[0] if names else decision["name"]
    reason = f"{GIVEN}: {GLOO}={given}" if given else decision["reason"]
    choice = Decision(what="interface", value=name, reason=reason, rejected=decision["rejected"])
    return ChosenInterface(choice=choice, address=address)


def _host(
    store: Store,
    size: int,
    offered: Sequence[Interface],
    host: str,
    lacking: LaunchError | None,
    deadline: float,
) -> dict[str, Any]:
    """Offer rank 0's interfaces, collect the other ranks' reports, and decide."""
    if lacking is not None:
        store.set(_OFFER, json.dumps({"host": host, "port": 0, "token": "", "interfaces": []}))
        return {"error": lacking.texts}
    token = secrets.token_hex(16)
    with listen(0) as server, answering(server, f"{token}\n".encode(), _FULL):
        port = server.getsockname()[1]
        shown = [(one.name, one.addresses) for one in offered]
        offer = {"host": host, "port": port, "token": token, "interfaces": shown}
        store.set(_OFFER, json.dumps(offer))
        await_all(store, size, deadline, key=_REPORT)
    said = [json.loads(store.get(_REPORT.format(rank=rank))) for rank in range(1, size)]
    return decide(offered, [InterfaceReport(**each) for each in said], host=host)


def decide(
    offered: Sequence[Interface], reports: Sequence[InterfaceReport], *, host: str
) -> dict[str, Any]:
    """Return the decision for all ranks: the name of rank 0's interface with reasons, or the error.

    `reports` are those of ranks 1, 2 …, `host` is that of rank 0.
    """
    broken = next((report.error for report in reports if report.error is not None), None)
    if broken is not None:
        return {"error": broken}
    missed = {one.name: why for one in offered if (why := _missed(one.name, reports, host))}
    common = [one for one in offered if one.name not in missed]
    if not common:
        return {"error": _nobody(offered, missed, host).texts}
    # If all ranks have used the loopback, they are on one machine, and other hosts can't listen there.
    # Of equals, the first.
    best = max(common, key=lambda one: (one.loopback, one.infiniband, one.speed or _UNKNOWN))
    others = {one.name: f"{_speed(one)}, {best.name} {_speed(best)}" for one in common if one != best}
    unreached = {one.name: missed[one.name] for one in offered if one.name in missed}
    loopback = {one.name for one in offered if one.loopback}
    rejected = {name: why for name, why in {**others, **unreached}.items() if name not in loopback}
    reason = f"all {len(reports) + 1} ranks have reached {host} (rank 0) through it"
    if others:
        reason += ", and it is the fastest" if not best.loopback else ": they are on one machine"
    return {"name": best.name, "reason": reason, "rejected": rejected}


def _missed(name: str, reports: Sequence[InterfaceReport], host: str) -> str:
    """Return the rank that did not reach rank 0 by interface `name`, and why; empty if all did."""
    for rank, report in enumerate(reports, 1):
        if name not in report.reached:
            why = report.failed.get(name, "not tried")
            return f"{report.host} (rank {rank}) did not reach {host} (rank 0) through it: {why}"
    return ""


def _nobody(offered: Sequence[Interface], missed: Mapping[str, str], host: str) -> LaunchError:
    names = ", ".join(f"{one.name} ({', '.join(one.addresses)})" for one in offered)
    real = [one.name for one in offered if not one.loopback] or [one.name for one in offered]
    found = "; ".join(f"{name}: {missed[name]}" for name in real) or "it has no network interface"
    ports = "all ports"
    with suppress(OSError):
        ports = f"TCP ports {'-'.join(_PORTS.read_text().split())}"
    return LaunchError(
        given=f"the network of {host} (rank 0): {names}",
        found=found,
        fix=f"let the hosts of a job connect to each other at {ports}, since Gloo and NCCL use any "
        f"free port; or, if another interface is right, export {GLOO}=NAME (unset it if it is set)",
    )


def _lacking(given: str, mine: Sequence[Interface], host: str) -> LaunchError | None:
    """Return the error for names in `given` that this machine does not have, else None."""
    names = [one.name for one in mine]
    absent = [name for name in given.split(",") if name not in names]
    if not absent:
        return None
    there = ", ".join(f"{one.name} ({', '.join(one.addresses)})" for one in mine)
    return LaunchError(
        given=f"{GLOO}={given} on {host}",
        found=f"{host} has no interface {absent[0]} that is up with an address; it has {there}",
        fix=f"unset {GLOO} to use the fastest interface that all hosts share; or set one of these",
    )


def _call(
    offer: Mapping[str, Any], host: str, mine: Sequence[Interface], given: Sequence[Interface]
) -> InterfaceReport:
    """Call rank 0 by all the interfaces that it offers at once, and report the results."""
    sources = [address for one in given for address in one.addresses]
    pool = ThreadPoolExecutor(max(1, len(offer["interfaces"])))
    calls = {
        pool.submit(_reach, addresses, offer["port"], offer["token"], sources): name
        for name, addresses in offer["interfaces"]
    }
    _wait_for_some(list(calls))
    pool.shutdown(wait=False, cancel_futures=True)
    reached, failed = {}, {}
    for call, name in calls.items():
        if not call.done():
            failed[name] = "no answer before another interface had one"
        elif call.exception() is not None:
            failed[name] = str(call.exception())
        else:
            reached[name] = call.result()
    return InterfaceReport(host=host, reached=reached, failed=failed)


def _wait_for_some(calls: Sequence[Future[str]]) -> None:
    """Wait for all calls, but not much longer than for the first that succeeds."""
    waiting = set(calls)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        if any(call.exception() is None for call in done):
            wait(waiting, timeout=_LATE_SECONDS)
            return


def _reach(addresses: Sequence[str], port: int, token: str, sources: Sequence[str]) -> str:
    """Return this rank's address by which it reaches one of rank 0's, from `sources` if there are any.

    Raises OSError.
    """
    failures = []
    for address in addresses:
        alike = [one for one in sources if (":" in one) == (":" in address)]
        if sources and not alike:
            failures.append(f"{address}: the given interface has no such address")
            continue
        try:
            return _reach_one(address, port, token, alike[0] if alike else "")
        except OSError as error:
            failures.append(f"{address}, port {port}: {error}")
    raise OSError("; ".join(failures))


def _reach_one(address: str, port: int, token: str, source: str) -> str:
    call = socket.create_connection(
        (address, port), timeout=CALL_SECONDS, source_address=(source, 0) if source else None
    )
    with call, call.makefile("rb") as answer:
        if answer.readline(1000).decode(errors="replace").strip() != token:
            raise OSError("another program answers at this address")
        try:
            whole = len(answer.read(len(_FULL))) == len(_FULL)
        except OSError:
            whole = False
        if not whole:
            raise OSError(
                "small packets arrive and full-size packets are lost: a switch or a tunnel "
                "between them has a smaller MTU than their interfaces (ip link set dev NAME mtu 1400)"
            )
        return str(call.getsockname()[0])


def _speed(one: Interface) -> str:
    kind = "InfiniBand, " if one.infiniband else ""
    return f"{kind}{one.speed} Mbit/s" if one.speed else f"{kind}unknown speed"
