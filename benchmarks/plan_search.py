"""The speed of the search of `shoal plan`, and a comparison with an exhaustive search.

For a model on increasing numbers of devices, it prints the configurations, how many of them are
screened in a second, how many remain for a prediction, and the time of the search. Then it predicts
all configurations on a few devices and compares the fastest with those of the search.

    python benchmarks/plan_search.py [--model llama-70b] [--machine h100-sxm] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from shoal.distributed.pipeline_schedules import action_lists
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.search.bounds import memory_bytes, step_bounds
from shoal.tools.plan.search.candidates import Candidates, find_candidates
from shoal.tools.plan.search.search import predict, search_plans
from shoal.tools.plan.work.configuration import ANY_PRECISION, FORMATS
from shoal.tools.plan.work.transformer import Transformer, parse_model

BATCH = 2048


def seconds(repeats: int, function: Callable[[], object]) -> float:
    """Return the median of the processor time of some calls, each without remembered schedules."""
    times = []
    for _ in range(repeats):
        action_lists.cache_clear()
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return statistics.median(times)


def screened(model: Transformer, machine: Machine, devices: int, precision: str) -> Candidates:
    """Return all configurations, after the memory and the bounds of those that fit."""
    precisions = tuple(FORMATS) if precision == ANY_PRECISION else (precision,)
    candidates = find_candidates(model, machine, devices, BATCH, precisions)
    fits = memory_bytes(model, candidates) <= machine.available
    if fits.any():
        step_bounds(model, machine, candidates.where(fits))
    return candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-70b")
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model, machine = parse_model(options.model), find_machine(options.machine)
    print(f"{options.model} on {options.machine}, batch {BATCH}, load {os.getloadavg()[0]:.2f}")
    print(f"{'devices':>7} {'precision':>9} {'tried':>8} {'screened/s':>11} {'predicted':>9}  search")
    for devices in (8, 16, 32, 64, 128, 256, 512, 1024):
        for precision in ("mixed", ANY_PRECISION):

            def search(devices: int = devices, precision: str = precision) -> object:
                return search_plans(model, machine, devices, BATCH, precision=precision)

            def screen(devices: int = devices, precision: str = precision) -> object:
                return screened(model, machine, devices, precision)

            found = search_plans(model, machine, devices, BATCH, precision=precision)
            rate = found.tried / seconds(options.repeats, screen)
            print(
                f"{devices:>7} {precision:>9} {found.tried:>8,} {rate:>11,.0f} {found.evaluated:>9,} "
                f"{seconds(options.repeats, search):>6.2f} s"
            )
    for devices in (8, 16):
        candidates = find_candidates(model, machine, devices, 64, ("mixed",))
        every = (predict(model, candidates.plan(each), machine) for each in range(len(candidates.rows)))
        fits = [each for each in every if each.memory.total <= machine.available]
        best = sorted((each.step.total, each.memory.total) for each in fits)[:5]
        found = search_plans(model, machine, devices, 64)
        same = [(each.step.total, each.memory.total) for each in found.best] == best
        print(f"{devices} devices: the exhaustive search has {'the same' if same else 'OTHER'} best")


if __name__ == "__main__":
    main()
