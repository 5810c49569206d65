"""The table of the fastest configurations."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.units import duration, percent, size

NUMERICS = (
    "Precisions differ in their results: fp16 sums gradients in 16 bits, half also keeps no float32 "
    "parameters. Compare losses."
)


def model_utilization(model: Transformer, machine: Machine, found: Prediction) -> float:
    """Return the model FLOP/s utilization (MFU) of a prediction, 0 to 1."""
    plan = found.plan
    peak = machine.half if plan.numbers.activation == 2 else machine.tf32 or machine.fp32
    return model.flops(plan.global_batch) / (found.step.total * plan.layout.size * peak)


def fastest_table(
    model: Transformer, machine: Machine, best: Sequence[Prediction]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table; its last three columns are numbers."""
    several = len({each.plan.precision for each in best}) > 1
    heads = ("layout", "batches", "recompute", "options", "step", "MFU", "memory")
    rows: list[tuple[str, ...]] = [
        (
            str(each.plan.layout),
            f"{each.plan.micro_batches} x {each.plan.micro_batch}",
            each.plan.recompute,
            ", ".join((*_options(each.plan), *((each.plan.precision,) if several else ()))),
            duration(each.step.total),
            percent(model_utilization(model, machine, each)),
            size(each.memory.total),
        )
        for each in best
    ]
    return heads, rows


def _options(plan: PlannedStep) -> list[str]:
    """Return the schedule of a pipeline, or the options of FSDP, unless they are the usual ones."""
    if plan.layout.pipeline > 1:
        stages = "" if SCHEDULES[plan.schedule].fixed else f" x {plan.stages}"
        return [] if plan.schedule == "1f1b" else [plan.schedule + stages]
    if plan.layout.shard == 1:
        return []
    return ["no reshard"] * plan.keeps_parameters + ["whole"] * plan.keeps_gradients
