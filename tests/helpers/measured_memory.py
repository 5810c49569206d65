"""The peak of the bytes that torch's CPU allocator has given out, by torch's profiler."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from helpers.planned_models import Built
from shoal.tools.plan.trace import planned_strategies
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.training.saved_plan import STEP_PRECISIONS


def allocated_peak(call: Callable[[], object], path: Path) -> int:
    """Return the largest number of bytes allocated during the call, in addition to those before it.

    The profiler records the bytes that are allocated after each allocation and release.
    """
    gc.collect()
    _count_in_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    changes = [each for each in events if each.get("name") == "[memory]"]
    first = min(changes, key=lambda each: each["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return int(max(each["args"]["Total Allocated"] for each in changes) - before)


def _count_in_all_threads() -> None:
    """Let torch's CPU allocator count the releases of all threads.

    It counts those of threads that are profiled, and Gloo's threads are not when they release the
    buffers of a collective: these would count as allocated until the end. The flag has no function in
    Python.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def measured_peak(world: shoal.World, build: Callable[[], Built], plan: PlannedStep, path: Path) -> int:
    """Return the peak of three real steps of a training with the plan, from the model's creation on."""
    make, task, dataset = build()

    def train() -> None:
        model = shoal.parallelize(make(), world, planned_strategies(plan))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = shoal.Step(model, optimizer, task, clip=1.0, precision=STEP_PRECISIONS[plan.precision])
        loader = shoal.Loader(
            dataset,
            world,
            batch_size=plan.global_batch,
            micro_batches=plan.micro_batches,
            shuffle=False,
        )
        for batch in loader.epochs(3):
            step(batch)
            if step.number == 3:
                break

    return allocated_peak(train, path)
