"""Traced memory of ten models, compared with the peak of torch's allocator in real steps.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --ranks 2 --layout shard=2 --models transformer U-Net

The measured peak is the sum of allocations and releases that torch's profiler records, from the
creation of the model to the end of the third step, on rank 0. Traced memory comes from one process. The
models are those of `tests/plan/test_memory_trace.py`. The figures do not depend on the load of the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import shoal

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.measured_memory import measured_peak
from helpers.planned_models import MODELS
from helpers.ranks import Ranks
from shoal.bench.scaling.models import Workload
from shoal.distributed.layout import Layout
from shoal.plan.configuration import PlannedStep
from shoal.plan.trace import trace_step


def built(name: str) -> Workload:
    """Return a model with its task and its dataset."""
    return Workload(*MODELS[name]())


def measured_here(world: shoal.World, name: str, plan: PlannedStep, folder: str) -> int:
    """Return the measured peak of this rank."""
    return measured_peak(world, MODELS[name], plan, Path(folder) / f"trace-{world.rank}.json")


def main() -> None:
    """Print a table, and with --json one line of its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", default="replicate=-1")
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layout = Layout.parse(options.layout).resolve(options.ranks)
    plan = PlannedStep(
        layout=layout,
        global_batch=options.batch,
        micro_batch=options.batch // layout.data_size,
        recompute=options.recompute,
        precision="fp32",
    )
    figures = {}
    print(f"{layout}, global batch {options.batch}, recompute {options.recompute}, float32")
    print(f"{'model':18}{'measured':>12}{'traced':>12}{'difference':>12}", flush=True)
    with tempfile.TemporaryDirectory() as folder, Ranks(options.ranks, layout=str(layout)) as ranks:
        for name in options.models:
            measured, *_ = ranks.call(measured_here, name, plan, folder)
            traced = trace_step(partial(built, name), plan).memory
            figures[name] = {"measured": measured, "traced": traced.total, "moment": traced.moment}
            difference = traced.total / measured - 1
            print(
                f"{name:18}{measured / 1e6:9.1f} MB{traced.total / 1e6:9.1f} MB{difference:12.1%}",
                flush=True,
            )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
