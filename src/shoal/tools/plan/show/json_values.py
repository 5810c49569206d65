"""Predictions as the values of which JSON is made: seconds, bytes, tokens per second."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.prediction import Prediction
from shoal.tools.plan.time.rates import peak_rate
from shoal.tools.plan.time.seconds import step_band, step_kind
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer


def utilization(model: Transformer, machine: Machine, found: Prediction) -> float:
    """Return the model FLOP/s utilization (MFU) of a prediction, 0 to 1."""
    plan = found.plan
    peak: float = peak_rate(plan, machine)
    return model.flops(plan.global_batch) / (found.step_seconds * plan.layout.size * peak)


def prediction_values(model: Transformer | None, machine: Machine, found: Prediction) -> dict[str, Any]:
    """Return a prediction as values: of a transformer, or of the rank of a module that needs most."""
    plan, time, memory = found.plan, found.time, found.memory
    values: dict[str, Any] = _plan_values(plan) | {
        "strategy": strategy_text(found),
        "step_seconds": found.step_seconds,
        "parts": time.measured_parts,
        "memory": memory.kinds,
        "step": time.parts,
    }
    if model is not None:
        return values | {
            "kind": step_kind(plan, time),
            "band": step_band(plan, time),
            "tokens_per_second": plan.global_batch * model.seq / time.total,
            "mfu": utilization(model, machine, found),
            "memory_bytes": memory.total,
        }
    return values | {
        "change": found.change,
        "fits": found.fits,
        "needed_bytes": found.needed,
        "margin_bytes": found.margin,
        "traced_bytes": memory.total,
        "pipeline_rank": found.place,
        "memory": {**memory.kinds, "moment": memory.moment, "reserved": memory.reserved},
        "rank_bytes": [each.total for each in found.memories],
        "collectives": found.collectives,
    }


def _plan_values(plan: PlannedStep) -> dict[str, Any]:
    """Return what `shoal.load_plan` reads, and the script needs."""
    return {
        "layout": str(plan.layout),
        "devices": plan.layout.size,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "recompute": plan.recompute,
        "precision": plan.precision,
        "schedule": plan.schedule if plan.layout.pipeline > 1 else None,
        "stages_per_rank": plan.stages,
        "split_points": plan.split_points,
        "reshard_after_forward": plan.reshard_after_forward,
        "accumulate": plan.accumulate,
    }


def strategy_text(found: Prediction) -> str:
    """Return the strategy as it is written in a script; that of a trace without default options."""
    if not found.runs:
        return found.plan.strategy
    from shoal.tools.plan.trace import planned_strategies  # imports torch

    texts = []
    for each in planned_strategies(found.plan):
        options = ((field, getattr(each, field.name)) for field in fields(each) if field.init)
        given = [f"{field.name}={own!r}" for field, own in options if own != _usual(field)]
        texts.append(f"shoal.{type(each).__name__}({', '.join(given)})")
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _usual(option: Field[Any]) -> Any:
    made = option.default_factory
    return option.default if made is MISSING else made()
