"""Shared parts of the GPU benchmarks: rounds in a given time, peak memory, the table."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.util import accelerator

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness

WARM_UP = 5
"""Steps before the first round: torch.compile compiles, and Shoal compares the ranks."""
_TRACKED = 5
"""Steps whose memory is tracked."""


class Measured(NamedTuple):
    """The measurements of a loop."""

    times: list[float]
    """Seconds of a step, one value for each round."""
    peak: int | None
    """The most bytes of tensors in a step, of this loop alone; None where the device counts none."""


def parse_options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options, with `--seconds` from the start of the process for fewer rounds."""
    return harness.parse(doc, **defaults, seconds=math.inf)


def since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def alternate(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    world: shoal.World,
    *,
    rounds: int,
    steps: int,
    seconds: float = math.inf,
) -> dict[str, Measured]:
    """Make the loops, and measure their steps in rounds until `seconds` after the start. Collective."""
    loops: dict[str, Callable[[], float]] = {}
    peaks: dict[str, int | None] = {}
    for name, make in makers.items():
        before = allocated(world.device)
        step = make()
        harness.timed(world, step, WARM_UP)
        peak = peak_allocated(step, world.device)
        peaks[name] = None if peak is None or before is None else peak - before
        loops[name] = partial(harness.timed, world, step, steps)
    goes_on = RoundTimer(seconds, world).goes_on
    times = harness.alternate(loops, rounds, goes_on=goes_on)
    return {name: Measured(own, peaks[name]) for name, own in times.items()}


class RoundTimer:
    """The time that is left for rounds, each of which takes as long as the one before it."""

    def __init__(self, seconds: float, world: shoal.World) -> None:
        self._seconds, self._world = seconds, world
        self._begun = since_start()

    def goes_on(self) -> bool:
        """Return whether there is time for another round on all ranks. Collective."""
        now, begun = since_start(), self._begun
        self._begun = now
        return bool(max(self._world.gather(2 * now - begun)) <= self._seconds)


def allocated(device: torch.device) -> int | None:
    """Return the bytes of tensors on a device; None if it has no count."""
    gc.collect()
    return accelerator.memory(device).get("device_memory")


def peak_allocated(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes of tensors on a device during a step; None if it has no count."""
    gc.collect()
    module = accelerator.streams(device)
    if module is None:
        return None
    module.reset_peak_memory_stats(device)
    step()
    accelerator.synchronize(device)
    return accelerator.memory(device)["device_peak"]


def peak_memory(
    model: nn.Module, optimizer: Optimizer, step: Callable[[], object], device: torch.device
) -> dict[str, int]:
    """Return the largest number of bytes of tensors during a step, with the state that it begins with.

    "tracked" is by torch's tracker, on any device: the smallest of several steps, because with FSDP2 on
    the CPU, the parameters of two units live simultaneously in some steps and not in others.
    "allocated" is by the device's allocator, and is left out on a device without one.
    """
    # Private, so that another torch may lack it: only this measurement needs it.
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    peaks = []
    for _ in range(_TRACKED):
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            step()
        peaks.append(sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values()))
    tracked = min(peaks)
    peak = peak_allocated(step, device)
    return {"tracked": tracked} if peak is None else {"tracked": tracked, "allocated": peak}


def figures_of(found: Mapping[str, Measured], plain: str) -> dict[str, Any]:
    """Return the medians of loops: step time, throughput relative to the plain loop, peak memory."""
    figures: dict[str, Any] = {}
    for name, (times, peak) in found.items():
        figures[name] = {"step_ms": round(statistics.median(times) * 1e3, 3), "rounds": len(times)}
        if name != plain:
            speed = statistics.median(harness.ratios(found[plain].times, times))
            figures[name][f"throughput / {plain}"] = round(speed, 4)
        if peak is not None:
            figures[name]["peak_mb"] = round(peak / 1e6, 1)
    return figures


def cells_of(measured: Measured) -> dict[str, Any]:
    """Return the columns of step time and peak memory."""
    peak = {} if measured.peak is None else {"peak (MB)": measured.peak / 1e6}
    return {"step (ms)": harness.spread([1e3 * each for each in measured.times]), **peak}


def print_figures(given: argparse.Namespace, figures: Mapping[str, Any], world: shoal.World) -> None:
    """Print figures as one line of JSON, if it was asked for."""
    if world.is_rank_zero:
        harness.finish(given, figures)


def show(title: str, rows: Sequence[Mapping[str, Any]], world: shoal.World) -> None:
    """Print a table on rank 0, with the device, the version of torch and the date."""
    if world.is_rank_zero:
        device = accelerator.name(world.device) or "CPU"
        backend = next(str(each.value) for each in world.decisions if each.what == "backend")
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks ({backend})"
        harness.show(f"{title}: {ranks}, {device}, {harness.machine()}", rows)
