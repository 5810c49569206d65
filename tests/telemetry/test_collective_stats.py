"""What collectives come to: sizes, bandwidths by nccl-tests' definitions, what is estimated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from helpers.clocks import ManualClock
from shoal.telemetry import flight_recorder
from shoal.telemetry.collective_stats import CollectiveStats, bus_factor, kind_of, size_of
from shoal.telemetry.flight_recorder import CollectiveCall, GroupProgress


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def traffic(clock: ManualClock) -> CollectiveStats:
    return CollectiveStats(clock.now)


def call(
    record: int,
    operation: str = "all_reduce",
    *,
    sent: int = 400,
    received: int = 400,
    seconds: float | None = None,
    done: bool = True,
    backend: str = "gloo",
) -> CollectiveCall:
    return CollectiveCall(
        "r", record, backend, "0", "0", record + 1, operation, sent, received, seconds, done
    )


def only(fields: Mapping[str, Any]) -> dict[str, Any]:
    (kind,) = fields["kinds"]
    return dict(kind)


def test_names_of_backends_are_of_few_kinds() -> None:
    names = {
        "all_reduce": ("all_reduce", "allreduce_coalesced"),
        "all_gather": ("_all_gather_base", "ALLGATHER_coalesced", "allgather_into_tensor_coalesced"),
        "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        "send": ("send 0->1",),
        "all_to_all": ("all_to_all",),
    }
    for kind, operations in names.items():
        assert {kind_of(call(0, each)).operation for each in operations} == {kind}


@pytest.mark.parametrize(
    ("operation", "sent", "received", "size", "factor"),
    [
        ("all_reduce", 100, 100, 100, 1.5),
        ("all_gather", 100, 400, 400, 0.75),
        ("all_gather", 100, 0, 400, 0.75),
        ("reduce_scatter", 400, 100, 400, 0.75),
        ("reduce_scatter", 0, 100, 400, 0.75),
        ("gather", 100, 0, 400, 0.75),
        ("scatter", 0, 100, 400, 0.75),
        ("all_to_all", 100, 100, 100, 0.75),
        ("broadcast", 100, 100, 100, 1.0),
        ("send", 100, 0, 100, 1.0),
        ("barrier", 0, 0, 0, 1.0),
    ],
)
def test_sizes_and_factors_are_those_of_nccl_tests(
    operation: str, sent: int, received: int, size: int, factor: float
) -> None:
    assert size_of(call(0, operation, sent=sent, received=received), operation, 4) == size
    assert bus_factor(operation, 4) == factor


def test_recorded_times_give_exact_bandwidths(traffic: CollectiveStats, clock: ManualClock) -> None:
    clock.sleep(10.0)
    fields = traffic.count([call(n, seconds=0.5, backend="nccl") for n in range(4)], {"0": 4})
    assert fields["seconds"] == 10.0
    assert only(fields) == {
        "kind": "all_reduce",
        "group": "0",
        "ranks": 4,
        "backend": "nccl",
        "calls": 4,
        "bytes": 1600,
        "seconds": 2.0,
        "counted": "recorded",
        "timed": "recorded",
        "exact": True,
        "algorithm": 800.0,
        "bus": 1200.0,
    }


def test_a_call_counts_once_and_when_it_has_ended(traffic: CollectiveStats) -> None:
    begun = [call(0, seconds=1.0), call(1, done=False), call(2, seconds=1.0)]
    assert only(traffic.count(begun, {"0": 2}))["calls"] == 2
    assert traffic.count([call(1, done=False), *begun[2:]], {"0": 2})["kinds"] == []
    ended = [call(1, seconds=1.0), call(2, seconds=1.0), call(3, seconds=1.0)]
    kind = only(traffic.count(ended, {"0": 2}))
    assert (kind["calls"], kind["counted"]) == (2, "recorded")


def test_the_newest_stand_for_those_that_the_recorder_has_dropped(traffic: CollectiveStats) -> None:
    traffic.count([call(0, seconds=1.0)], {"0": 2})
    kept = [call(n, seconds=0.25) for n in range(301, 401)]
    kind = only(traffic.count(kept, {"0": 2}))
    assert (kind["calls"], kind["bytes"], kind["seconds"]) == (400, 160_000, 100.0)
    assert (kind["counted"], kind["exact"]) == ("estimated", False)


def test_what_is_under_way_when_looked_at_gives_the_seconds(
    traffic: CollectiveStats, clock: ManualClock
) -> None:
    # Number 1 is seen twice, 2 and 3 together once, and nothing is under way at the last look.
    for passed, begun, ended in ((1.0, 1, 0), (1.0, 1, 0), (0.5, 3, 1), (2.0, 3, 3)):
        clock.sleep(passed)
        traffic.see({"0": GroupProgress(begun, ended)})
    kind = only(traffic.count([call(n) for n in range(3)], {"0": 2}))
    assert kind["seconds"] == pytest.approx(2.0 + 2 * 0.5)
    assert (kind["timed"], kind["exact"]) == ("estimated", False)


def test_nothing_is_said_of_times_that_nobody_knows(
    traffic: CollectiveStats, clock: ManualClock
) -> None:
    clock.sleep(1.0)
    traffic.see({"0": GroupProgress(1, 0)})
    kind = only(traffic.count([call(0, backend="nccl")], {"0": 2}))
    assert (kind["timed"], kind["seconds"], kind["exact"]) == ("unknown", 0.0, False)
    assert "algorithm" not in kind
    assert "bus" not in kind


def test_of_a_dump_only_what_is_new_is_read() -> None:
    entries = [{"input_sizes": [[n]], "record_id": n, "retired": True} for n in range(3, 10)]
    text = json.dumps({"entries": entries, "pg": {"0": {}}}, separators=(",", ":")).encode()
    for after in (-1, 0, 3, 8, 9, 12):
        found = flight_recorder._above(text, after)
        assert [entry["record_id"] for entry in found] == [n for n in range(3, 10) if n > after]
