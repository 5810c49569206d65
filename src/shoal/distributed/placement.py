"""The placement of one process in a world, and the parameters of the rendezvous."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

_T = TypeVar("_T")

LAST_PORT = 65535
PORTS = "SHOAL_PORTS"
"""Sets the range of ports for the rendezvous if the launcher sets no port: `first-last`."""

DIRECTORY = "SHOAL_MEETING"
"""Sets the directory, shared by all machines, in which rank 0 publishes its address if needed."""

# Below the ephemeral ports (32768 and up), so that no outgoing connection can hold one of them.
_DEFAULT_PORTS = "10001-20000"
_TRIES = 8

_FIX = "start the script with `shoal run -n N script.py`, or unset {names}"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The parameters of the rendezvous if the launcher sets no address and port.

    Rank 0 takes the first free port of `ports`. The others look for it at each of `hosts` and in the
    file that it writes into `directory` (none if empty). `job` identifies the rendezvous; no other job,
    step or attempt has the same. `others` are the job's other machines, if the launcher lists them.
    `choices` are the decisions about hosts and ports.
    """

    job: str
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    directory: str = ""
    others: tuple[str, ...] = field(default=(), compare=False)
    choices: tuple[Decision[Any], ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The position of one process among the ranks of a run, read from the launcher's variables.

    `World.placement` has it; users do not construct one.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of ranks, or world size.
        local_rank: Number of this process on its node, from 0.
        local_size: Number of ranks on this node.
        node: Number of this node, from 0.
        nodes: Number of nodes.
        cores: Number of CPU cores for this process.
        address: Host or IP address of rank 0 for the rendezvous; the first one to try if there is a
            `meeting`.
        port: Port of rank 0 for the rendezvous; 0 if none is needed.
        launcher: Name of the program that started the ranks, such as `"torchrun"`.
        attempt: Number of this attempt at the same job: 0 for the first, and 1 more after each restart.
        job: Name of the job, the same in all its attempts, for launchers that may leave ranks of an
            earlier attempt running; empty otherwise.
        meeting: Parameters of the rendezvous if the launcher sets no address and port; else None.
        unsettled: Names of the fields that the launcher does not set, since it does not report which
            ranks are on the same node. Until the rendezvous, these fields hold guesses.
            `World.placement` has their final values, and its `unsettled` is empty.
        warning: Warning that rank 0 prints about a launch that is valid but may not be intended.
        reason: Environment variables that the placement was read from.
        choices: Decisions about the launcher, the cores and the address.

    Examples:
        >>> with shoal.init(device="cpu") as world:
        ...     print(world.placement.local_rank, world.placement.nodes)
        0 1
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    cores: int
    address: str
    port: int
    launcher: str
    attempt: int = 0
    job: str = ""
    meeting: Meeting | None = None
    unsettled: tuple[str, ...] = ()
    warning: str = ""
    reason: str
    choices: tuple[Decision[Any], ...] = field(default=(), compare=False)

    def settled(self, machines: Sequence[str], local_ranks: Sequence[int]) -> Placement:
        """Return the same placement after all ranks reported machine and local rank, in rank order.

        Raises LaunchError if the launcher set local ranks that are not 0, 1, 2 … on each machine.
        """
        here = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        order = list(dict.fromkeys(machines))
        known = {
            "local_rank": here.index(self.rank),
            "local_size": len(here),
            "node": order.index(machines[self.rank]),
            "nodes": len(order),
        }
        given = [local_ranks[rank] for rank in here]
        kept = bool(self.unsettled) and "local_rank" not in self.unsettled
        if kept and sorted(given) != list(range(len(here))):
            ranks, numbers = (", ".join(map(str, each)) for each in (here, given))
            raise LaunchError(
                given=self.reason,
                found=f"ranks {ranks} are on the same machine, and their local ranks are {numbers}",
                fix="unset LOCAL_RANK: Shoal numbers the ranks at the rendezvous",
            )
        values = {name: known[name] for name in self.unsettled}
        return replace(self, **values, unsettled=())  # type: ignore[arg-type]

    def with_cores(self, cores: Decision[int]) -> Placement:
        """Return the same placement with a different number of cores."""
        others = tuple(choice for choice in self.choices if choice.what != cores.what)
        return replace(self, cores=cores.value, choices=(*others, cores))

    def __post_init__(self) -> None:
        pairs = (
            ("rank", self.rank, "world size", self.size),
            ("local rank", self.local_rank, "local size", self.local_size),
            ("node", self.node, "number of nodes", self.nodes),
            ("local size less one", self.local_size - 1, "world size", self.size),
        )
        for name, value, limit_name, limit in pairs:
            if not 0 <= value < limit:
                raise LaunchError(
                    given=self.reason,
                    found=f"{name} {value} does not fit {limit_name} {limit}",
                    fix="start the script with one launcher only, and do not set these by hand",
                )


def meet(
    env: Mapping[str, str],
    *,
    job: str,
    hosts: Decision[tuple[str, ...]],
    number: int | None = None,
    shared: bool = False,
    others: tuple[str, ...] = (),
) -> Meeting:
    """Return the rendezvous parameters of the job `job`; MASTER_ADDR and MASTER_PORT win if set.

    `hosts` are those where rank 0 may be, as a decision. `number` is a number of the job; jobs with
    successive numbers get different first ports. With `shared`, rank 0 also publishes its address in a
    directory that all machines see. `others` are the other machines of the job.
    """
    own = bool(env.get("MASTER_ADDR"))
    unset = {"one of your own": "MASTER_ADDR is not set"}
    hosts = _given("address", env["MASTER_ADDR"], "ADDR") if own else replace(hosts, rejected=unset)
    given_port = env.get("MASTER_PORT")
    ports = (
        _given("port", master_port(env, least=1), "PORT") if given_port else ports_of(env, job, number)
    )
    choices: tuple[Decision[Any], ...] = (hosts, ports)
    directory = ""
    if shared and not own:
        chosen = _directory(env)
        directory, choices = chosen.value, (*choices, chosen)
    return Meeting(
        job=job,
        hosts=hosts.value,
        ports=ports.value,
        directory=directory,
        others=others,
        choices=choices,
    )


def _given(what: str, value: _T, suffix: str) -> Decision[tuple[_T, ...]]:
    """Return the decision about an address or a port that MASTER_ADDR or MASTER_PORT gives."""
    return Decision(what=what, value=(value,), reason=f"{GIVEN}: MASTER_{suffix}={value}")


def master_port(env: Mapping[str, str], *, least: int = 0) -> int:
    """Return MASTER_PORT if it is a valid port. 0 is valid unless `least` is higher."""
    port = integer(env, "MASTER_PORT")
    if not least <= port <= LAST_PORT:
        raise LaunchError(
            given=spell(env, ("MASTER_PORT",)),
            found=f"ports are numbers from 1 to {LAST_PORT}",
            fix="unset MASTER_PORT to let Shoal find a free port; or set a free one (ss -ltn)",
        )
    return port


def one_machine(variables: str) -> Decision[tuple[str, ...]]:
    """Return the address of ranks that `variables` put on one machine."""
    reason = f"all ranks are on this machine ({variables})"
    return Decision(what="address", value=("127.0.0.1",), reason=reason)


def divided(cpus: int, local_size: int) -> Decision[int]:
    """Return the cores of one of `local_size` processes, as far as it can know without the others."""
    reason = f"{cpus} core(s) in its affinity, divided by {local_size} process(es) of this machine"
    return Decision(what="cores", value=max(1, cpus // max(1, local_size)), reason=reason)


def _directory(env: Mapping[str, str]) -> Decision[str]:
    if env.get(DIRECTORY):
        value, reason = env[DIRECTORY], f"{GIVEN}: {DIRECTORY}={env[DIRECTORY]}"
    else:
        value = f"{env.get('HOME') or '~'}/.cache/shoal/meeting"
        reason = (
            f"no scheduler lists the nodes, so rank 0 writes its address here; {DIRECTORY} is not set"
        )
    return Decision(what="meeting", value=value, reason=reason)


def ports_of(
    env: Mapping[str, str], job: str, number: int | None = None, *, tries: int = _TRIES
) -> Decision[tuple[int, ...]]:
    """Return the ports for the rendezvous of `job`, at most `tries`, in the order of the attempts."""
    text = env.get(PORTS) or _DEFAULT_PORTS
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= LAST_PORT):
        raise LaunchError(
            given=f"{PORTS}={text}",
            found=f"not a range of ports from 1 to {LAST_PORT}",
            fix=f"export {PORTS}={_DEFAULT_PORTS} (the default)",
        )
    count = int(last) - int(first) + 1
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:8], "little") if number is None else number
    # Jobs with the same first port continue with different ones, and each reaches every port.
    stride = 1 + int.from_bytes(digest[8:16], "little") % max(1, count - 1)
    while math.gcd(stride, count) > 1:
        stride += 1
    steps = (int(first) + (start + i * stride) % count for i in range(min(tries, count)))
    by = f"{PORTS}={text}" if env.get(PORTS) else f"{text}; {PORTS} is not set"
    return Decision(
        what="port",
        value=tuple(dict.fromkeys(steps)),
        reason=f"the first free one of these; the job determines them, in the range {by}",
        rejected={"one of your own": "MASTER_PORT is not set"},
    )


def scheduler_job(env: Mapping[str, str]) -> str:
    """Return the name of a job of Slurm, Grid Engine or PBS, the same in all its attempts; else "".

    They restart a job when a node is silent, and its ranks there may still run and hold resources.
    """
    if env.get("SLURM_JOB_ID"):
        return f"slurm-{env.get('SLURM_CLUSTER_NAME', '')}-{env['SLURM_JOB_ID']}"
    if env.get("SGE_TASK_ID"):
        return f"sge-{env.get('SGE_CELL', '')}-{env.get('JOB_ID', '')}.{env['SGE_TASK_ID']}"
    return f"pbs-{env['PBS_JOBID']}" if env.get("PBS_JOBID") else ""


def earlier_attempts(env: Mapping[str, str]) -> int:
    """Return how often the scheduler has started this job before."""
    aws = max(0, integer(env, "AWS_BATCH_JOB_ATTEMPT", 1) - 1)
    # Grid Engine sets it to 0 or 1, the batch scripts of `shoal submit`, also for PBS, to the number.
    named = env.get("SGE_TASK_ID") or env.get("PBS_JOBID")
    restarted = integer(env, "RESTARTED", 0) if named else 0
    return integer(env, "SLURM_RESTART_COUNT", 0) + aws + restarted


def refuse_many_worlds(given: str, found: str, names: str) -> LaunchError:
    """Return the error for N processes that would each be a world of size 1."""
    return LaunchError(
        given=given,
        found=f"{found}: each would be a separate world",
        fix=f"start the script with one launcher only; if this is intended, unset {names}",
    )


def require(env: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Raise LaunchError with those of `names` that are not set."""
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = tuple(name for name in names if env.get(name))
        raise LaunchError(
            given=spell(env, present),
            found=f"{', '.join(missing)} not set",
            fix=_FIX.format(names=" ".join(present)),
        )


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer in a variable; `default` if it is not set or empty."""
    if default is not None and not env.get(name):
        return default
    return parse(env, name, int)


def parse(env: Mapping[str, str], name: str, read: Callable[[str], _T]) -> _T:
    """Return a variable as converted by `read`; its ValueError becomes a LaunchError."""
    try:
        return read(env[name])
    except ValueError:
        raise LaunchError(
            given=f"{name}={env[name]}",
            found=f"{name} can't be read",
            fix=_FIX.format(names=name),
        ) from None


def spell(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return those of the variables `names` that are set, as a user would type them."""
    return ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
