"""Traced memory of ten models, compared with the peak of torch's allocator in real steps.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --layouts shard=2 pipeline=2 --models transformer U-Net --runs 4

The measured peak is what torch's profiler records, from the creation of the model to the end of the
third step: the smallest and the largest of all ranks with the same part of the model, in all runs.
Traced memory comes from one process. The models are those of `tests/plan/test_memory_trace.py`. The
figures do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import shoal

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.measured_memory import measured_peak
from helpers.planned_models import MODELS
from helpers.ranks import Ranks
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.search.fit import trace_pipeline
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.util.errors import ShoalError

LAYOUTS = ["replicate=1", "replicate=2", "shard=2", "tensor=2", "context=2", "pipeline=2"]


def built(name: str) -> Workload:
    """Return a model with its task and its dataset."""
    return Workload(*MODELS[name]())


def measured_here(world: shoal.World, name: str, plan: PlannedStep, folder: str) -> int:
    """Return the measured peak of this rank."""
    return measured_peak(world, MODELS[name], plan, Path(folder) / f"trace-{world.rank}.json")


def main() -> None:
    """Print a table for each layout, and with --json one line of its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="layouts")
    parser.add_argument("--batch", type=int, default=8, help="global batch size")
    parser.add_argument("--micro-batch", type=int, help="samples (default: local batch; pipeline: 2)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for text in options.layouts:
        layout = Layout.parse(text)
        usual = 2 if layout.pipeline > 1 else options.batch // layout.data_size
        plan = PlannedStep(
            layout=layout,
            global_batch=options.batch,
            micro_batch=options.micro_batch or usual,
            recompute=options.recompute,
            precision="fp32",
        )
        print(f"{text}, global batch {options.batch}, recompute {options.recompute}, float32")
        figures[text] = {}
        with tempfile.TemporaryDirectory() as folder, Ranks(layout.size, layout=text) as ranks:
            for name in options.models:
                try:
                    row = compared(ranks, name, plan, folder, options.runs)
                except ShoalError as error:
                    print(f"{name:18} none: {error.found}", flush=True)
                    continue
                figures[text][name] = row
                low, high, traced = row["smallest"], row["largest"], row["traced"]
                print(
                    f"{name:18}{low / 1e6:8.1f} to{high / 1e6:6.1f} MB{traced / 1e6:9.1f} MB"
                    f"{traced / low - 1:9.1%}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(figures))


def compared(ranks: Ranks, name: str, plan: PlannedStep, folder: str, runs: int) -> dict[str, Any]:
    """Return the traced peak and the measured ones of the place in the pipeline that needs most."""
    steps = trace_pipeline(partial(built, name), plan, find_machine("cpu"))
    place, step = max(enumerate(steps), key=lambda each: each[1].memory.reserved)
    mine = [
        rank for rank in range(plan.layout.size) if plan.layout.coordinate(rank, "pipeline") == place
    ]
    peaks = []
    for _ in range(runs):
        each = ranks.call(measured_here, name, step.plan, folder)
        peaks += [each[rank] for rank in mine]
    return {
        "smallest": min(peaks),
        "largest": max(peaks),
        "traced": step.memory.total,
        "moment": step.memory.moment,
        "split_points": step.plan.split_points,
    }


if __name__ == "__main__":
    main()
