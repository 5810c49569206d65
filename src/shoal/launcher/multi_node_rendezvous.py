"""The rendezvous of nodes: torch elastic's dynamic rendezvous, in a store of this run only."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from torch.distributed import DistError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from shoal._torch.elastic import CheckedBackend, MonitoredRendezvous
from shoal.distributed.cluster_env import NODES_RUN_ID
from shoal.distributed.env_vars import ports
from shoal.launcher.attempt_outcome import AttemptOutcome, Kind
from shoal.launcher.elastic_agent import serve
from shoal.launcher.nodes import Nodes, differences, listen, way_to, why_silent
from shoal.util.clock import CLOCK, local_time, run_within
from shoal.util.errors import LaunchError

BEAT = 1.0
"""Seconds between two signs of life of a node; torch looks for changes as often."""

# torch polls once a second; random delays separate nodes that wait for the same moment.
_LAST_CALL = timedelta(seconds=3)
_PAUSE = 0.02
_NAME, _JOB, _END = "shoal/name", "shoal/job", "shoal/end"
_ARRIVED, _DEPARTED, _VERDICT, _DONE = "shoal/arrived", "shoal/departed", "verdict", "done"


class ClosedError(Exception):
    """The run ended, with this outcome, before this node could take part again."""

    def __init__(self, verdict: AttemptOutcome) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def _connect(host: str, port: int, limit: float) -> TCPStore:
    """Return the store that another node serves, trying for `limit` seconds.

    It uses a thread, since torch's own time limit does not end the wait for a silent server.
    """
    timeout = timedelta(seconds=limit)
    try:
        return run_within(limit + BEAT, lambda: TCPStore(host, port, is_master=False, timeout=timeout))
    except (TimeoutError, DistError):
        raise TimeoutError(why_silent(host, port)) from None


@dataclass(frozen=True, kw_only=True)
class NodeAttempt:
    """One attempt of several nodes: this node's number, the identities and processes of all."""

    number: int
    node: int
    nodes: tuple[str, ...]
    processes: tuple[int, ...]
    store: Store

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        return sum(self.processes[: self.node])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.processes)

    def propose(self, verdict: AttemptOutcome) -> AttemptOutcome:
        """Decide how this attempt ends: as the first node that proposed an outcome said."""
        return AttemptOutcome.parse(self.store.compare_set(_VERDICT, "", verdict.render()))

    def verdict(self) -> AttemptOutcome | None:
        """Return how this attempt ended; None while it runs."""
        return AttemptOutcome.parse(self.store.get(_VERDICT)) if self.store.check([_VERDICT]) else None

    def finish(self) -> None:
        """Report, once, that all ranks of this node have ended well."""
        self.store.add(_DONE, 1)

    def finished(self) -> int:
        """Return the number of nodes that have reported this."""
        return int(self.store.add(_DONE, 0))


class NodesRendezvous(RendezvousHandler):
    """The rendezvous of several nodes; each attempt has a store of its own for its ranks.

    Raises LaunchError if the others can't be reached, or run something else.
    """

    def __init__(self, nodes: Nodes, *, processes: int, label: str) -> None:
        self._nodes = nodes
        self._processes = processes
        self._label = label
        self._ranks_store: TCPStore | None = None
        self._left: list[str] = []
        self.again = False
        self.attempt: NodeAttempt | None = None
        self._store, self.hosts = self._meet()
        name = self._store.compare_set(_NAME, "", f"{NODES_RUN_ID}-{secrets.token_hex(8)}")
        self._run_id = name.decode()
        address = nodes.host if self.hosts else way_to(nodes)
        self._members = MonitoredRendezvous.from_backend(
            self._run_id,
            self._store,
            CheckedBackend(self._store, self._run_id),
            nodes.least,
            nodes.most,
            local_addr=address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=nodes.wait),
                last_call=_LAST_CALL,
                close=timedelta(seconds=nodes.silence),
                heartbeat=timedelta(seconds=nodes.silence),
            ),
            keep_alive_interval=cast(int, BEAT),
            keep_alive_max_attempt=max(2, round(nodes.silence / BEAT)),
        )
        self._address = address
        self._store.set(f"shoal/label/{self.me}", label)
        self._store.add(_ARRIVED, 1)

    def _meet(self) -> tuple[TCPStore, bool]:
        """Return the store, and whether this node hosts it: the first one at its address does."""
        nodes, patience = self._nodes, max(10.0, 3 * self._nodes.silence)
        server = listen(nodes.host, nodes.port, unknown=nodes.unknown)
        if isinstance(server, socket.socket):
            store = serve(server, nodes.host, patience)
        else:
            try:
                store = _connect(nodes.host, nodes.port, nodes.wait)
            except (DistError, RuntimeError, ValueError, TimeoutError) as error:
                raise LaunchError(
                    given=f"--rendezvous {nodes.address}",
                    found=f"no other node of this run answers there within {nodes.wait:g} s "
                    f"({str(error).splitlines()[0][:200]}); here, {server}",
                    fix="start the command on the node with that address too, with a free port",
                ) from None
            store.set_timeout(timedelta(seconds=patience))
        theirs = json.loads(store.compare_set(_JOB, "", json.dumps(dict(nodes.job))))
        found = differences(nodes.job, theirs)
        if found:
            raise LaunchError(
                given=f"a node at --rendezvous {nodes.address}",
                found=f"another run uses this rendezvous: {found}",
                fix="start the same command on every node, or use another port for this run",
            )
        return store, isinstance(server, socket.socket)

    @property
    def me(self) -> str:
        """The identity of this node."""
        return str(self._members.me)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to the attempt's store, which survives the death of any rank."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "nodes"

    def get_run_id(self) -> str:
        """Return the name of this run."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for enough nodes. Raises LaunchError after the time limit, ClosedError after the end."""
        self.again = False
        while True:
            try:
                info = self._members.next_rendezvous()
            except RendezvousTimeoutError:
                raise self._too_few() from None
            except DistStoreError:
                # The first node died before it had written the address of the ranks' store.
                continue
            except (RendezvousClosedError, RendezvousGracefulExitError):
                raise ClosedError(self._end()) from None
            meeting = self._gather(info)
            if meeting is not None and self.attempt is not None:
                return RendezvousInfo(info.store, self.attempt.node, info.world_size, meeting)

    def _gather(self, info: RendezvousInfo) -> RendezvousStoreInfo | None:
        """Return all nodes' processes and the new store's address; None if a node is lost first."""
        store, rank, size = info.store, info.rank, info.world_size
        everyone, _ = self._members.look()
        # First close the last attempt's store.
        self._ranks_store = None
        where: list[object] = []
        if rank == 0:
            where = [self._address, self._open_ranks_store()]
        store.set(f"node/{rank}", json.dumps([self._nodes.index, self._processes, *where]))
        keys = [f"node/{node}" for node in range(size)]
        while not store.check(keys):
            CLOCK.sleep(_PAUSE)
            if len(self._members.look()[0]) < size:
                return None
        if len(everyone) < size:
            return None
        found = [json.loads(store.get(key)) for key in keys]
        order = sorted(range(size), key=lambda node: found[node][0])
        self.attempt = NodeAttempt(
            number=self._members.round,
            node=order.index(rank),
            nodes=tuple(everyone[node] for node in order),
            processes=tuple(found[node][1] for node in order),
            store=store,
        )
        return RendezvousStoreInfo(*found[0][2:])

    def _open_ranks_store(self) -> int:
        server = listen(self._address, *ports())
        if isinstance(server, str):
            raise LaunchError(
                given=f"{self._label}, whose ranks join the rendezvous at {self._address}",
                found=server,
                fix="use the name or the address of a node's own interface: --rendezvous HOST:PORT",
            )
        self._ranks_store = serve(server, self._address, self._nodes.wait)
        return int(self._ranks_store.port)

    def look(self) -> tuple[list[str], list[str]]:
        """Return the nodes that take part and those that wait."""
        here, waiting = self._members.look()
        return here, waiting

    def labels(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the names of these nodes in messages."""
        keys = {node: f"shoal/label/{node}" for node in nodes}
        return {
            node: self._store.get(key).decode()
            for node, key in keys.items()
            if self._store.check([key])
        }

    def count(self, kind: Kind) -> int:
        """Return the number of attempts that have ended this way."""
        return int(self._store.add(f"shoal/count/{kind}", 0))

    def count_one(self, kind: Kind, before: int) -> None:
        """Count one more than before this attempt; every node of it may do so."""
        self._store.compare_set(f"shoal/count/{kind}", str(before), str(before + 1))

    def note_left(self, nodes: Sequence[str], by_me: bool) -> None:
        """Remember nodes that left; the first node that noticed it departs for them."""
        self._left += [f"{node} at {local_time(CLOCK.wall(), '%H:%M:%S')}" for node in nodes]
        if by_me:
            self._store.add(_DEPARTED, len(nodes))

    def leave(self, verdict: AttemptOutcome) -> None:
        """Stop taking part, and record why."""
        if self.attempt is not None and not self.again:
            self.attempt.propose(verdict)
        self._members.leave(BEAT)
        self._store.add(_DEPARTED, 1)

    def end(self, verdict: AttemptOutcome) -> None:
        """Close the run for nodes that wait to join, and leave when no node needs the store."""
        self._store.compare_set(_END, "", verdict.render())
        self._members.shutdown()
        self.depart()

    def depart(self) -> None:
        """Leave; the node with the store waits for the others, while they may be alive."""
        with suppress(DistError, RuntimeError):
            self._store.add(_DEPARTED, 1)
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait, on the node with the store, until the others have departed or must be dead."""
        with suppress(DistError, RuntimeError):
            deadline = CLOCK.now() + self._nodes.silence
            while self.hosts and CLOCK.now() < deadline:
                if self._store.add(_DEPARTED, 0) >= self._store.add(_ARRIVED, 0):
                    break
                CLOCK.sleep(_PAUSE)

    def _end(self) -> AttemptOutcome:
        if not self._store.check([_END]):
            return AttemptOutcome(kind="ended", text="the run has ended", code=1)
        return AttemptOutcome.parse(self._store.get(_END))

    def _too_few(self) -> LaunchError:
        here, waiting = self._members.look()
        others = self.labels([node for node in (*here, *waiting) if node != self.me]).values()
        there = ", ".join([self._label, *others])
        left = f"; left: {', '.join(self._left)}" if self._left else ""
        return LaunchError(
            given=f"--nodes {self._nodes.text}, --rendezvous {self._nodes.address}",
            found=f"after {self._nodes.wait:g} s too few nodes have joined: {there}{left}",
            fix="start the same command on more nodes, wait longer (--wait SECONDS), or use fewer",
        )

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return bool(self._members.is_closed())

    def set_closed(self) -> None:
        """End the run for all."""
        self._members.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes, for which elastic would restart."""
        return int(self.again)

    def shutdown(self) -> bool:
        """Close the attempt's store."""
        self._ranks_store = None
        return True
