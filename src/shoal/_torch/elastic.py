"""Private names of torch elastic: its rendezvous of several nodes, and its agent."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

from shoal.util.clock import CLOCK, utc_now
from shoal.util.pickling import holds_only

_STATE = (_RendezvousState, _NodeDesc, datetime, timezone, timedelta)


class ElasticAgent(SimpleElasticAgent):
    """Agent whose number of restarts can be read and raised; torch elastic hides both."""

    @property
    def restarts_used(self) -> int:
        """Number of restarts that torch elastic has counted as failures."""
        return int(self._worker_group.spec.max_restarts) - self._remaining_restarts

    def grant_restart(self) -> None:
        """Allow one more restart."""
        self._remaining_restarts += 1

    def end_restarts(self) -> None:
        """Allow no more restarts."""
        self._remaining_restarts = 0


class CheckedBackend(C10dRendezvousBackend):
    """The state of a rendezvous in a store without a password: torch unpickles what others wrote there.

    No public hook sees the bytes before that. With a torch that lacks this one nothing is checked.
    """

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        found: tuple[bytes, Any] | None = super()._decode_state(base64_state)
        if found is not None and not holds_only(found[0], _STATE):
            raise RendezvousStateError("another process wrote the state of the rendezvous")
        return found


class LocalHeartbeats(_BackendRendezvousStateHolder):
    """The state of a rendezvous; heartbeats are timed by the monotonic clock of this process.

    torch compares the wall clocks of two nodes: nodes whose clocks differ by more than the time limit
    remove each other again and again, and a clock that is set back ends the heartbeats of its node.
    """

    def __init__(self, backend: Any, settings: Any, me: _NodeDesc) -> None:
        super().__init__(backend, settings)
        self._me = me
        self._seen: dict[_NodeDesc, tuple[datetime, float]] = {}

    def _sanitize(self) -> None:
        now, moment = utc_now(), CLOCK.now()
        written = self._state.last_heartbeats
        for node, when in written.items():
            if node not in self._seen or self._seen[node][0] != when:
                self._seen[node] = when, moment
        # torch removes nodes by these, and others read what they wrote themselves.
        self._state.last_heartbeats = {
            node: now - timedelta(seconds=moment - self._seen[node][1]) for node in written
        }
        super()._sanitize()
        left = self._state.last_heartbeats
        self._state.last_heartbeats = {node: written[node] for node in left}
        if left.get(self._me) is not None and written[self._me] > now:
            self._state.last_heartbeats[self._me] = now - self._settings.keep_alive_interval


class MonitoredRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, which also reports its nodes; the public handler only counts them."""

    def __init__(
        self, node: _NodeDesc, settings: Any, backend_name: str, store: Any, state_holder: Any
    ) -> None:
        holder = LocalHeartbeats(state_holder._backend, settings, node)
        super().__init__(node, settings, backend_name, store, holder)

    @property
    def me(self) -> str:
        """The identity of this node."""
        return repr(self._this_node)

    @property
    def round(self) -> int:
        """The number of the current attempt, the same on all of its nodes."""
        return self._state_holder.state.round

    def look(self) -> tuple[list[str], list[str]]:
        """Return the nodes of the rendezvous, in the order of their ranks, and the waiting nodes."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            state = self._state_holder.state
            ranks = sorted(state.participants.items(), key=lambda item: item[1])
            return [repr(node) for node, _ in ranks], [repr(node) for node in state.wait_list]

    def leave(self, seconds: float) -> None:
        """Leave the rendezvous within `seconds`, so that no node waits for this one's timeout."""
        self._stop_heartbeats()
        with self._heartbeat_lock:
            self._op_executor.run(_RendezvousExitOp(), CLOCK.now() + seconds)
