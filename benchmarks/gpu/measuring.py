"""Shared parts of the GPU benchmarks: alternating rounds, peak memory, and the printed table."""

from __future__ import annotations

import datetime
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.optim import Optimizer

import shoal
from shoal.util import accelerator

WARM_UP = 5
"""Steps before the first round: torch.compile compiles, and Shoal compares the ranks."""
_TRACKED = 5
"""Steps whose memory is tracked."""


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
    loops: Mapping[str, Callable[[], object]], world: shoal.World, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop, one value for each round. Collective.

    Rounds alternate, in an order that rotates, so that clocks and heat drift for all loops.
    """
    for step in loops.values():
        timed(step, WARM_UP, world)
    names = list(loops)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(timed(loops[name], steps, world))
    return times


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
    peaks = []
    for _ in range(_TRACKED):
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            step()
        peaks.append(sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values()))
    tracked = min(peaks)
    gc.collect()
    module = accelerator.streams(device)
    if module is None:
        return {"tracked": tracked}
    module.reset_peak_memory_stats(device)
    step()
    accelerator.synchronize(device)
    return {"tracked": tracked, "allocated": accelerator.memory(device)["device_peak"]}


def show(title: str, rows: Sequence[Mapping[str, str]], world: shoal.World) -> None:
    """Print a table in Markdown on rank 0, with the device, the version of torch and the date."""
    device = accelerator.name(world.device) or "CPU"
    backend = next(str(each.value) for each in world.decisions if each.what == "backend")
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks ({backend})"
    today = datetime.datetime.now(datetime.UTC).date()
    world.print(f"{title}: {ranks}, {device}, torch {torch.__version__}, {today}\n")
    for cells in (rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)):
        world.print(f"| {' | '.join(cells)} |")
