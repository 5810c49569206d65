"""What is seen of a training on two ranks: traffic, FLOPs, and a timeline that was asked for."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from helpers.commands import wait_for
from helpers.ranks import Ranks
from helpers.small_training import events_of, squared_error, step_of
from helpers.trace_format import checked_events, steps_of
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from shoal.telemetry import flight_recorder
from shoal.telemetry.collective_stats import CollectiveStats
from shoal.telemetry.profiler import window
from shoal.telemetry.profiler.window import Window
from shoal.tools.report.timeline import merge_traces
from shoal.training.trace_recorder import Recorder

pytestmark = pytest.mark.processes

AHEAD = 3600 * 10**9


def sends(world: shoal.World, least: int) -> dict[str, Any]:
    """Known collectives; their sums by kind, by a clock on which a second passes from look to look.

    Rank 0 looks `least` times at each all-reduce before rank 1 begins it.
    """
    for _ in range(CHECKED_STEPS + 1):
        world.watchdog.begin_step()  # ends the comparison before each collective, which is one itself
    world.barrier()
    store = world.store("test/observed")
    ticks = itertools.count()
    traffic = CollectiveStats(lambda: float(next(ticks)))
    one, both = torch.ones(1000), torch.empty(2000)
    looks = 0
    for number in range(7):
        if world.rank:
            wait_for(partial(store.check, [str(number)]))
        work = dist.all_reduce(one, async_op=True)
        assert work is not None
        seen = 0
        while not work.is_completed():
            traffic.look()
            seen += 1
            if seen == least and not world.rank:
                store.set(str(number), "")
        looks += seen
    for _ in range(3):
        dist.all_gather_into_tensor(both, one.half().float())
    dist.broadcast(both, 0)
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    fields: dict[str, Any] = {}

    def counted() -> bool:  # Gloo marks the last ones as ended a little later
        for kind in traffic.window()["kinds"]:
            for name in ("calls", "bytes", "seconds"):
                sums[name][kind["kind"]] += kind[name]
            fields.setdefault(kind["kind"], kind)
        return sums["calls"].total() >= 11

    wait_for(counted)
    return {**sums, "kinds": fields, "looks": looks}


def test_calls_and_bytes_are_counted_exactly_and_seconds_estimated(two: Ranks) -> None:
    slow, quick = two.call(sends, 5)
    for rank in (slow, quick):
        assert rank["calls"] == {"all_reduce": 7, "all_gather": 3, "broadcast": 1}
        assert rank["bytes"] == {"all_reduce": 7 * 4000, "all_gather": 3 * 8000, "broadcast": 8000}
        kind = rank["kinds"]["all_reduce"]
        assert (kind["ranks"], kind["backend"], kind["counted"]) == (2, "gloo", "recorded")
        assert (kind["timed"], kind["exact"]) == ("estimated", False)
    # Only of the rank that waited: the other may see none of its calls under way, so no bandwidth.
    kind = slow["kinds"]["all_reduce"]
    assert kind["bus"] == pytest.approx(kind["algorithm"])
    assert kind["algorithm"] == pytest.approx(kind["bytes"] / kind["seconds"])
    # One that has ended may be seen under way a little longer, beside the next.
    assert 7 * 5 <= slow["seconds"]["all_reduce"] <= 2 * slow["looks"]


def await_all_ready(world: shoal.World, wish: str) -> None:
    store = world.store("shoal/traces")
    wait_for(lambda: store.add(f"{wish}/ready", 0) == world.size)


def await_all_recorded() -> None:
    """Gloo marks a call as ended a little later than whoever waits for it goes on."""
    wait_for(lambda: all(call.done for call in flight_recorder.recorded_calls({})))


def trains(world: shoal.World, directory: Path, steps: int) -> None:
    """Train a linear model, and record two steps of it: the fourth and fifth, or those asked for."""
    step = step_of(world, nn.Linear(6, 5), squared_error, lr=0.01)
    loader = shoal.Loader((torch.ones(50, 6), torch.ones(50, 5)), world, batch_size=10)
    wish = window.read_request(directory / "traces")
    profile = (4, 5) if wish is None else None
    with shoal.Run(directory, step, loader, trackers=(), profile=profile) as run:
        for batch in loader.epochs(10**6):
            step(batch)
            run.tick()
            if run.step == 5 and wish is not None:
                await_all_ready(world, wish.name)
            if run.step == steps:
                await_all_recorded()
                return


def test_a_run_records_flops_usage_traffic_and_a_timeline(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank-2-4-5.json.gz").write_bytes(b"of an earlier start on more ranks")
    two.call(trains, tmp_path, 8)
    for rank in (0, 1):
        (flops,) = events_of(tmp_path, "flops", rank)
        assert flops["per_sample"] == 2 * (2 * 6 * 5)  # forward, and into the weights
        assert "peak" not in flops
        assert flops["peak_reason"]
        usage = events_of(tmp_path, "usage", rank)[-1]
        assert usage["step"] == 8
        assert usage["rss"] > 10**7
        windows = events_of(tmp_path, "collectives", rank)
        kinds = [k for window in windows for k in window["kinds"] if k["kind"] == "all_reduce"]
        reduced, calls = (sum(kind[name] for kind in kinds) for name in ("bytes", "calls"))
        # From the first tick on: of parameters and two numbers with each of the 7 steps.
        assert (calls, reduced) == (7, 7 * 4 * (6 * 5 + 5 + 2))
    timeline = checked_events(merge_traces(tmp_path, 4, 5))
    begins = [steps_of(timeline, rank) for rank in (0, 1)]
    assert [sorted(each) for each in begins] == [[4, 5]] * 2
    assert any(event["name"] == "aten::addmm" for event in timeline)


@pytest.mark.full
def test_a_run_that_is_under_way_records_what_it_is_asked_for(two: Ranks, tmp_path: Path) -> None:
    window.write_request(tmp_path, Window(10, 11))
    two.call(trains, tmp_path, 12)
    timeline = checked_events(merge_traces(tmp_path, 10, 11))
    assert [sorted(steps_of(timeline, rank)) for rank in (0, 1)] == [[10, 11]] * 2
    assert window.read_request(tmp_path / "traces") is None


def records(world: shoal.World, directory: Path) -> None:
    """Steps that end together, recorded by ranks of which one's clock is an hour ahead."""

    def clock() -> int:
        return time.perf_counter_ns() + AHEAD * world.rank

    recorder = Recorder(world, directory, Window(2, 6), clock=clock)
    for step in range(1, 8):
        world.all_reduce(torch.ones(10))
        recorder.tick(step)


def test_a_clock_that_is_an_hour_ahead_is_set_right(two: Ranks, tmp_path: Path) -> None:
    two.call(records, tmp_path)
    timeline = checked_events(merge_traces(tmp_path, 2, 6))
    begins = [steps_of(timeline, rank) for rank in (0, 1)]
    assert [sorted(each) for each in begins] == [[2, 3, 4, 5, 6]] * 2
    # All steps but the first begin when an all-reduce has ended, which it does on both at once.
    apart = [abs(begins[0][step] - begins[1][step]) for step in range(3, 7)]
    assert min(apart) < 0.2e6
