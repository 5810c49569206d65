"""Shared parts of the GPU benchmarks: alternating rounds in a given time, peak memory, the table."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.util import accelerator

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all GPU benchmarks have."""
    parser.add_argument("--json", action="store_true", help="end with a line of figures in JSON")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="from the start of the process: fewer rounds rather than more time, but at least one",
    )


def since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def enough_time(seconds: float, begun: float, world: shoal.World) -> bool:
    """Return whether what began then, in `since_start`, can be repeated on all ranks. Collective."""
    now = since_start()
    return bool(max(world.gather(now + (now - begun))) <= seconds)


def timed(step: Callable[[], object], steps: int, world: shoal.World) -> float:
    """Return the seconds of a step, the mean of several, on the slowest rank. Collective."""
    accelerator.synchronize(world.device)
    world.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    accelerator.synchronize(world.device)
    return float(max(world.gather((time.perf_counter() - begun) / steps)))


def alternate(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    world: shoal.World,
    *,
    rounds: int,
    steps: int,
    seconds: float = math.inf,
) -> dict[str, Measured]:
    """Make the loops, and measure their steps in rounds, until `seconds` after the start. Collective.

    Rounds alternate, in an order that rotates, so that clocks and heat drift for all loops.
    """
    loops: dict[str, Callable[[], object]] = {}
    found: dict[str, Measured] = {}
    for name, make in makers.items():
        before = allocated(world.device)
        loops[name] = make()
        timed(loops[name], WARM_UP, world)
        peak = peak_allocated(loops[name], world.device)
        found[name] = Measured([], None if peak is None or before is None else peak - before)
    names = list(loops)
    for number in range(rounds):
        begun = since_start()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].times.append(timed(loops[name], steps, world))
        if not enough_time(seconds, begun, world):
            break
    return found


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


def middle(values: Sequence[float], digits: int = 3) -> str:
    """Return the median, the lowest and the highest value."""
    found = statistics.median(values), min(values), max(values)
    return "{} ({} to {})".format(*(f"{value:,.{digits}f}" for value in found))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of the values of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


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
            speed = statistics.median(ratios(found[plain].times, times))
            figures[name][f"throughput / {plain}"] = round(speed, 4)
        if peak is not None:
            figures[name]["peak_mb"] = round(peak / 1e6, 1)
    return figures


def cells_of(measured: Measured) -> dict[str, str]:
    """Return the columns of step time and peak memory."""
    peak = {} if measured.peak is None else {"peak (MB)": f"{measured.peak / 1e6:,.1f}"}
    return {"step (ms)": middle([1e3 * each for each in measured.times], 1), **peak}


def print_figures(given: argparse.Namespace, figures: Mapping[str, Any], world: shoal.World) -> None:
    """Print figures as one line of JSON, if it was asked for."""
    if given.json:
        world.print(json.dumps(figures))


def show(title: str, rows: Sequence[Mapping[str, str]], world: shoal.World) -> None:
    """Print a table in Markdown on rank 0, with the device, the version of torch and the date."""
    device = accelerator.name(world.device) or "CPU"
    backend = next(str(each.value) for each in world.decisions if each.what == "backend")
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks ({backend})"
    today = datetime.datetime.now(datetime.UTC).date()
    world.print(f"{title}: {ranks}, {device}, torch {torch.__version__}, {today}\n")
    for cells in (rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)):
        world.print(f"| {' | '.join(cells)} |")
