"""Heartbeats of nodes whose wall clocks are wrong."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from shoal._torch.elastic import CheckedBackend, MonitoredRendezvous


@pytest.mark.long
def test_heartbeats_are_timed_by_the_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        """An hour ahead until it is set back by two."""

        offset = timedelta(hours=1)

        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return super().now(tz) + cls.offset

    store = HashStore()
    backend = CheckedBackend(store, "run")
    other = MonitoredRendezvous.from_backend("run", store, backend, 1, 2, keep_alive_interval=3)
    other.next_rendezvous()
    monkeypatch.setattr(dynamic_rendezvous, "datetime", Clock)
    monkeypatch.setattr("shoal._torch.elastic.utc_now", lambda: Clock.now(UTC))
    node = MonitoredRendezvous.from_backend("run", store, backend, 1, 2, keep_alive_interval=3)
    assert node.look()[0] == [other.me]  # its heartbeat is an hour old by this clock
    Clock.offset = timedelta(hours=-1)
    before = other._state_holder.state.last_heartbeats[other._this_node]
    deadline = time.monotonic() + 60
    while True:
        with other._heartbeat_lock:
            other._state_holder.sync()
            if other._state_holder.state.last_heartbeats[other._this_node] < before:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.leave(1.0)
