"""The table of the fastest configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.plan.configuration import PlannedStep
from shoal.plan.machines import Machine
from shoal.plan.model import Transformer
from shoal.plan.search import Prediction
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
    """Return the head and the rows of the table; its last three columns are numbers.

    Columns of choices that are the usual ones in all rows, and a common precision, are left out.
    """
    columns = [(head, [text(each.plan) for each in best]) for head, text in _CHOICES.items()]
    choices = [(head, cells) for head, cells in columns if any(cells)]
    precisions = [each.plan.precision for each in best]
    if len(set(precisions)) > 1:
        choices.append(("precision", precisions))
    heads = (
        "layout",
        "micro-batches",
        "recompute",
        *(head for head, _ in choices),
        *("step", "MFU", "memory"),
    )
    rows = [
        (
            str(each.plan.layout),
            f"{each.plan.micro_batches} x {each.plan.micro_batch}",
            each.plan.recompute,
            *(cells[place] for _, cells in choices),
            duration(each.step.total),
            percent(model_utilization(model, machine, each)),
            size(each.memory.total),
        )
        for place, each in enumerate(best)
    ]
    return heads, rows


def _schedule(plan: PlannedStep) -> str:
    if plan.layout.pipeline == 1 or plan.schedule == "1f1b":
        return ""
    return plan.schedule if plan.stages == 1 else f"{plan.schedule} x {plan.stages}"


def _kept(plan: PlannedStep) -> str:
    if plan.layout.pipeline > 1 or plan.layout.shard == 1:
        return ""
    kept = ["parameters"] * plan.keeps_parameters + ["gradients"] * plan.keeps_gradients
    return ", ".join(kept)


_CHOICES: dict[str, Callable[[PlannedStep], str]] = {"schedule": _schedule, "FSDP keeps": _kept}
