"""Parts of the documents of `shoal plan`: bars, timelines and trainings, and their JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction
from shoal.tools.plan.time.rates import peak_rate
from shoal.tools.plan.time.step_error import step_band
from shoal.tools.plan.time.step_time import Span
from shoal.tools.plan.training.whole_training import TrainingEstimate
from shoal.tools.plan.work.stage_layers import stage_layers
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.document import BarPlot, DocumentBlock, Figure, SpanPlot, Table, Text
from shoal.util.units import compact, counted, duration, percent


def utilization(model: Transformer, machine: Machine, found: Prediction) -> float:
    """Return the model FLOP/s utilization (MFU) of a prediction, 0 to 1."""
    plan = found.plan
    peak: float = peak_rate(plan, machine)
    return model.flops(plan.global_batch) / (found.step_seconds * plan.layout.size * peak)


def prediction_values(model: Transformer | None, machine: Machine, found: Prediction) -> dict[str, Any]:
    """Return a prediction as values: of a transformer, or of the rank of a module that needs most."""
    plan, time, memory = found.plan, found.time, found.memory
    # The first ones are those that `shoal.load_plan` reads, and that a script needs.
    values: dict[str, Any] = {
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
        "strategy": strategy_text(found),
        "step_seconds": found.step_seconds,
        "parts": time.measured_parts,
        "memory": memory.kinds,
        "step": time.parts,
    }
    if model is not None:
        band = step_band(time, machine)
        return values | {
            "band": (band.low, band.high),
            "band_reasons": band.reasons,
            "tokens_per_second": plan.global_batch * model.seq / time.total,
            "mfu": utilization(model, machine, found),
            "memory_bytes": memory.total,
            "stage_layers": stage_layers(model, plan),
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
        "imbalance": found.imbalance,
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


_FARTHEST = 5.0
"""The largest multiple of the longest bar at which a limit is drawn."""
_TIMES = {"s": 1.0, "ms": 1e3, "µs": 1e6}
_BYTES = {"GB": 1e-9, "MB": 1e-6, "kB": 1e-3}
_NAMES = {
    "fp8": "products in FP8",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "experts": "expert parallel",
    "bubble": "pipeline bubble",
    "pipeline": "pipeline sends",
    "data": "exposed data parallel",
    "launch": "launch and host",
    "stragglers": "slowest device",
    "overhead": "eager overhead",
    "imbalance": "busiest experts",
    "repeated": "repeated steps",
    "waiting": "waiting for nodes",
}


def part_name(part: str) -> str:
    """Return the name of a part of a step or of a training for people."""
    return _NAMES.get(part, part)


def time_bars(
    first: str, every: str, labels: Sequence[str], parts: Sequence[Mapping[str, float]]
) -> list[DocumentBlock]:
    """Return bars of the seconds of parts, for each label; a terminal shows the first."""
    named = [{part_name(name): value for name, value in each.items()} for each in parts]
    return _bars("step", (first, every), labels, named, _TIMES)


def memory_bars(
    first: str,
    every: str,
    labels: Sequence[str],
    kinds: Sequence[Mapping[str, float]],
    limit: float,
    name: str = "memory",
) -> list[DocumentBlock]:
    """Return bars of the bytes of each kind, for each label, and the usable memory as a line."""
    return _bars(name, (first, every), labels, kinds, _BYTES, limit)


def _bars(
    name: str,
    captions: tuple[str, str],
    labels: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    units: Mapping[str, float],
    limit: float | None = None,
) -> list[DocumentBlock]:
    """Return the bar of the first label for a terminal, if it has a caption, and all for a page.

    Parts below a thousandth of all bars are left out. `limit` is drawn as a line, unless it is so far
    away that the bars would be invisible.
    """
    used = [part for part in parts[0] if any(each[part] > 0.001 * sum(each.values()) for each in parts)]
    longest = max(sum(each.values()) for each in parts)
    unit = next((unit for unit, scale in units.items() if longest * scale >= 1), [*units][-1])
    drawn = limit is not None and limit < _FARTHEST * longest
    line = ("usable memory", limit * units[unit]) if limit is not None and drawn else None
    plot = BarPlot(
        labels=labels,
        parts={part: [each[part] * units[unit] for each in parts] for part in used},
        x=unit,
        of="configuration",
        limit=line,
    )
    first, every = captions
    shown: list[DocumentBlock] = [Figure(name=name, caption=f"{every}.", drawing=plot)]
    return [Figure(name=name, caption=first, drawing=plot, only="terminal"), *shown] if first else shown


def timeline(what: str, ranks: Sequence[Sequence[Span]]) -> Figure:
    """Return a figure of the spans of the ranks of a pipeline."""
    return Figure(
        name="pipeline",
        caption=f"{what}: when each rank computes what. In the gaps, it waits.",
        drawing=SpanPlot(
            labels=[f"rank {place}" for place in range(len(ranks))],
            spans=[[(kind, start * 1e3, stop * 1e3) for kind, start, stop in row] for row in ranks],
            x="milliseconds",
            of="rank",
        ),
    )


def training_columns(found: Sequence[TrainingEstimate]) -> dict[str, list[str]]:
    """Return the columns of a table of trainings; without prices and deadlines, theirs are empty."""
    late = any(each.in_time < 1 for each in found)
    return {
        "training": [duration(each.median.total) for each in found],
        "price": [compact(each.price) if each.price else "" for each in found],
        "in time": [percent(each.in_time) if late else "" for each in found],
    }


def training_blocks(
    best: Sequence[Prediction], found: Sequence[TrainingEstimate]
) -> list[DocumentBlock]:
    """Return the training in each layout, its parts in the first, and these in sentences."""
    columns = training_columns(found)
    parts = {name: value for name, value in vars(found[0].median).items() if name != "failures"}
    return [
        Table(
            caption="Whole training",
            head=("layout", *columns),
            rows=[*zip((str(each.plan.layout) for each in best), *columns.values(), strict=True)],
            right=[*columns],
            whole=("layout",),
        ),
        Table(
            caption="Training with the first",
            head=("part", "time"),
            rows=[(part_name(name), duration(value)) for name, value in parts.items() if value],
            right=("time",),
        ),
        Text(text=" ".join(_training_sentences(found[0]))),
    ]


def training_values(found: TrainingEstimate) -> dict[str, Any]:
    """Return the estimate of a training as plain values; durations in seconds."""
    return {
        "seconds": found.median.total,
        "seconds_80_percent": [found.quantile(0.1).total, found.quantile(0.9).total],
        "parts": found.median,
        "save_interval": found.interval,
        "device_hours": found.device_hours,
        "price": found.price,
        "goodput": found.goodput,
        "in_time": found.in_time,
    }


def _training_sentences(found: TrainingEstimate) -> list[str]:
    """Return the duration, the price and the failures of a training as sentences."""
    median, low, high = found.median, found.quantile(0.1), found.quantile(0.9)
    price = f", at a price of {compact(found.price)}" if found.price else ""
    goodput = f" The goodput is {percent(found.goodput)}." if median.failures else ""
    sentences = [
        f"The training takes {duration(median.total)} and {compact(found.device_hours)} device hours"
        f"{price}.{goodput}"
    ]
    every = "only at the end" if math.isinf(found.interval) else f"every {duration(found.interval)}"
    if len(found.simulated) > 1:
        failures = [each.failures for each in found.simulated]
        sentences.append(
            f"With random failures, 80 % of {len(found.simulated)} simulated trainings took "
            f"{duration(low.total)} to {duration(high.total)}, with {min(failures)} to "
            f"{counted(max(failures), 'failure')}. Save {every}."
        )
    elif median.failures:
        sentences.append(f"The trace interrupts it {counted(median.failures, 'time')}. Save {every}.")
    if found.in_time < 1:
        sentences.append(f"{percent(found.in_time)} of the simulated trainings meet the deadline.")
    return sentences
