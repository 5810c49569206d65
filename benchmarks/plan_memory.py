"""Traced memory of ten models, compared with the peak of torch's allocator in real steps.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --layouts shard=2 pipeline=2 --models transformer U-Net --runs 4

The measured peak is what torch's profiler records, from the creation of the model to the end of the
third step: the smallest and the largest of all ranks with the same part of the model, in all runs.
Traced memory comes from one process. The models are those of `tests/plan/test_memory_trace.py`. The
figures do not depend on the load of the machine. By default, a micro-batch is the local batch, in a
pipeline 2.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import shoal
from harness import finish, parse, show, versions
from helpers.measured_memory import measured_peak
from helpers.planned_models import MODELS
from helpers.ranks import Ranks
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.search.fit import trace_pipeline
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.util.errors import ShoalError

LAYOUTS = ["replicate=1", "replicate=2", "shard=2", "tensor=2", "context=2", "pipeline=2"]


def built(name: str) -> Workload:
    """Return a model with its task and its dataset."""
    return Workload(*MODELS[name]())


def measured_here(world: shoal.World, name: str, plan: PlannedStep, folder: str) -> int:
    """Return the measured peak of this rank."""
    return measured_peak(world, MODELS[name], plan, Path(folder) / f"trace-{world.rank}.json")


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
        "smallest, MB": min(peaks) / 1e6,
        "largest, MB": max(peaks) / 1e6,
        "traced, MB": step.memory.total / 1e6,
        "error": f"{step.memory.total / min(peaks) - 1:+.1%}",
        "moment": step.memory.moment,
    }


def main() -> None:
    usual = {"layouts": LAYOUTS, "models": MODELS, "recompute": ("none", "selective", "full")}
    given = parse(__doc__, **usual, batch=8, micro_batch=int, runs=2)
    figures: dict[str, list[dict[str, Any]]] = {}
    for text in given.layouts:
        layout = Layout.parse(text)
        micro_batch = 2 if layout.pipeline > 1 else given.batch // layout.data_size
        plan = PlannedStep(
            layout=layout,
            global_batch=given.batch,
            micro_batch=given.micro_batch or micro_batch,
            recompute=given.recompute,
            precision="fp32",
        )
        rows = figures[text] = []
        with tempfile.TemporaryDirectory() as folder, Ranks(layout.size, layout=text) as ranks:
            for name in given.models:
                try:
                    found = compared(ranks, name, plan, folder, given.runs)
                except ShoalError as error:
                    found = {"moment": f"none: {error.found}"}
                rows.append({"model": name, **found})
        title = f"{text}, global batch {given.batch}, recompute {given.recompute}, float32"
        show(f"{title}, {versions('shoal', 'torch')}", rows)
    finish(given, {"plan_memory": figures})


if __name__ == "__main__":
    main()
