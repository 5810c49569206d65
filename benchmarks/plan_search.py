"""The speed of the search of `shoal plan`.

For a model on increasing numbers of devices, it prints the configurations, how many of them are
screened in a second, how many remain for a prediction, and the time of the search.

    python benchmarks/plan_search.py [--model llama-70b] [--machine h100-sxm] [--repeats 3] [--json]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

from harness import finish, parse, show
from harness import machine as here
from shoal.distributed.pipeline_schedules import action_lists
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.memory.estimate import PUBLISHED_MARGIN, estimate_memory
from shoal.tools.plan.search.candidates import Candidates, FixedOptions, find_candidates
from shoal.tools.plan.search.search import search_plans
from shoal.tools.plan.time.step_time import bound_step
from shoal.tools.plan.work.planned_step import ANY_PRECISION
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
    candidates = find_candidates(model, machine, devices, BATCH, FixedOptions(precision=precision))
    fits = (1 + PUBLISHED_MARGIN) * estimate_memory(model, candidates).total <= machine.available
    bound_step(model, candidates.where(fits), machine)
    return candidates


def main() -> None:
    sizes = [8, 16, 32, 64, 128, 256, 512, 1024]
    given = parse(__doc__, model="llama-70b", machine="h100-sxm", devices=sizes, repeats=3)
    model, machine = parse_model(given.model), find_machine(given.machine)
    rows = []
    for devices, precision in itertools.product(given.devices, ("mixed", ANY_PRECISION)):
        fixed = FixedOptions(precision=precision)
        search = partial(search_plans, model, machine, devices, BATCH, fixed)
        screen = partial(screened, model, machine, devices, precision)
        found = search()
        rows.append(
            {
                "devices": devices,
                "precision": precision,
                "tried": found.tried,
                "screened/s": found.tried / seconds(given.repeats, screen),
                "predicted": found.evaluated,
                "search, s": seconds(given.repeats, search),
            }
        )
    show(f"{given.model} on {given.machine}, batch {BATCH}, {here()}", rows)
    finish(given, {"plan_search": rows})


if __name__ == "__main__":
    main()
