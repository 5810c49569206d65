"""A search result as text and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from shoal.tools.plan.check import RunCheck, predicted_parts
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction, SearchResult
from shoal.tools.plan.search.what_if import WhatIf
from shoal.tools.plan.show.fastest_table import NUMERICS, fastest_table, model_utilization
from shoal.tools.plan.time.bands import BANDS, step_band, step_kind
from shoal.tools.plan.training.whole_training import Training, TrainingEstimate, estimate_training
from shoal.tools.plan.work.configuration import PlannedLayout, PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.tables import print_line, print_rows
from shoal.util.units import compact, counted, duration, percent, size

_BAR, _OTHERS = 30, 8
ANSWER_HEAD = ("change", "fastest layout", "step", "difference")
CHECK_HEAD = ("part", "predicted", "measured")
_NAMES = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "bubble": "pipeline bubble",
    "pipeline": "pipeline sends",
    "data": "exposed data parallel",
    "launch": "launch and host",
    "stragglers": "slowest device",
    "repeated": "repeated steps",
    "waiting": "waiting for nodes",
}


def part_name(part: str) -> str:
    """Return the name of a part of a step for people."""
    return _NAMES.get(part, part)


def result_values(model: Transformer, machine: Machine, result: SearchResult) -> dict[str, Any]:
    """Return a result as plain values. Seconds, bytes and tokens per second; `band` is of the time."""
    return {
        "machine": machine.name,
        "model": asdict(model) | {"parameters": model.parameters},
        "tried": result.tried,
        "fitting": result.fitting,
        "evaluated": result.evaluated,
        "available_bytes": machine.available,
        "best": [prediction_values(model, machine, each) for each in result.best],
        "rejected": [
            {"reason": reason} | prediction_values(model, machine, each)
            for each, reason in result.rejected
        ],
    }


def prediction_values(model: Transformer, machine: Machine, found: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values, in the same units."""
    plan, total = found.plan, found.step.total
    return plan_values(plan) | {
        "strategy": plan.strategy,
        "step_seconds": total,
        "parts": predicted_parts(found.step),
        "kind": step_kind(plan, found.step),
        "band": list(step_band(plan, found.step)),
        "tokens_per_second": plan.global_batch * model.seq / total,
        "mfu": model_utilization(model, machine, found),
        "memory_bytes": found.memory.total,
        "memory": asdict(found.memory),
        "step": asdict(found.step),
    }


def plan_values(plan: PlannedStep) -> dict[str, Any]:
    """Return what `shoal.load_plan` reads, and the script needs, as plain values."""
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
        "split_points": list(plan.split_points),
        "reshard_after_forward": plan.reshard_after_forward,
        "accumulate": plan.accumulate,
    }


def print_result(console: Console, model: Transformer, machine: Machine, result: SearchResult) -> None:
    """Print the best configurations, the parts of the first, and why others are not among them."""
    print_line(
        console,
        f"{compact(model.parameters)} parameters on {machine.name}, {size(machine.available)} usable "
        f"per device. {result.fitting:,} of {result.tried:,} configurations fit.",
        "",
    )
    if result.best:
        _print_best(console, model, machine, result)
    if result.rejected:
        rows = [(str(each.plan.layout), reason) for each, reason in result.rejected[:_OTHERS]]
        print_rows(console, "Others", ("best of its axes", "why not"), rows)
    if not result.best:
        print_line(
            console, "No configuration fits: use more devices, more memory, or --precision half."
        )


def _print_best(console: Console, model: Transformer, machine: Machine, result: SearchResult) -> None:
    heads, rows = fastest_table(model, machine, result.best)
    print_rows(console, "Fastest", heads, rows, right=heads[-3:])
    first = result.best[0]
    print_line(console, f"The strategy of the first: {first.plan.strategy}.")
    if len({each.plan.precision for each in result.best}) > 1:
        print_line(console, NUMERICS)
    total = first.step.total
    kind = step_kind(first.plan, first.step)
    low, high = BANDS[kind]
    print_line(
        console,
        f"The first: {compact(first.plan.global_batch * model.seq / total)} tokens/s. 80 % of measured "
        f"steps of this kind ({kind}) took {low:.2f} to {high:.2f} times the predicted time: "
        f"{duration(low * total)} to {duration(high * total)}.",
    )
    if kind == "host":
        print_line(
            console, "Layers this small wait for the host, so that the error is larger: measure."
        )
    print_line(console, "")
    step = {part_name(name): value for name, value in asdict(first.step).items()}
    bars = [(name, duration(value), bar(value / total)) for name, value in step.items()]
    print_rows(console, "Step of the first", ("part", "time", ""), bars, right=("time",))
    kinds = asdict(first.memory).items()
    bars = [(name, size(value), bar(value / machine.available)) for name, value in kinds]
    print_rows(console, "Memory of the first", ("kind", "bytes", ""), bars, right=("bytes",))


def answer_values(found: WhatIf) -> dict[str, Any]:
    """Return the answer to a question as plain values; seconds and a ratio of step times."""
    return {
        "question": found.question,
        "layout": str(found.best.plan.layout) if found.best else None,
        "step_seconds": found.best.step.total if found.best else None,
        "ratio": found.ratio,
        "part": found.part,
        "part_change_seconds": found.change,
    }


def answer_rows(answers: Sequence[WhatIf]) -> list[tuple[str, str, str, str]]:
    """Return the question, the fastest layout, its step time and the largest change, as text."""
    rows = []
    for each in answers:
        if each.best is None:
            rows.append((each.question, "none fits", "", ""))
            continue
        change = ""
        if each.ratio is not None and each.change is not None and each.part is not None:
            change = f"{each.ratio - 1:+.1%}: {part_name(each.part)} "
            change += f"{'+' if each.change >= 0 else '-'}{duration(abs(each.change))}"
        rows.append((each.question, str(each.best.plan.layout), duration(each.best.step.total), change))
    return rows


def print_answers(console: Console, answers: Sequence[WhatIf]) -> None:
    """Print the fastest layout for each question, compared with that of the search."""
    print_rows(console, "What if", ANSWER_HEAD, answer_rows(answers), right=ANSWER_HEAD[2:3])


def training_estimate(
    training: Training, found: PlannedLayout, machine: Machine, tokens: int = 1
) -> TrainingEstimate:
    """Return the estimate of a whole training in one layout, with samples of `tokens` tokens."""
    plan = found.plan
    devices = plan.layout.size
    return estimate_training(
        training,
        found.step_seconds,
        devices,
        plan.global_batch * tokens,
        nodes=math.ceil(devices / machine.devices),
    )


def training_table(
    layouts: Sequence[PlannedLayout], found: Sequence[TrainingEstimate]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table of trainings, one for each layout."""
    priced = any(each.price for each in found)
    late = any(each.in_time < 1 for each in found)
    heads = ("layout", "training", *(("price",) if priced else ()), *(("in time",) if late else ()))
    rows = [
        (
            str(layout.plan.layout),
            duration(each.median.total),
            *((compact(each.price),) if priced else ()),
            *((percent(each.in_time),) if late else ()),
        )
        for layout, each in zip(layouts, found, strict=True)
    ]
    return heads, rows


def training_values(found: TrainingEstimate) -> dict[str, Any]:
    """Return the estimate of a training as plain values; durations in seconds."""
    return {
        "seconds": found.median.total,
        "seconds_80_percent": [found.quantile(0.1).total, found.quantile(0.9).total],
        "parts": asdict(found.median),
        "save_interval": found.interval if math.isfinite(found.interval) else None,
        "device_hours": found.device_hours,
        "price": found.price,
        "goodput": found.goodput,
        "in_time": found.in_time,
    }


def training_parts(found: TrainingEstimate) -> list[tuple[str, float]]:
    """Return the parts of the median training in seconds, without those that take no time."""
    parts = asdict(found.median)
    del parts["failures"]
    return [(part_name(name), seconds) for name, seconds in parts.items() if seconds]


def training_sentences(found: TrainingEstimate) -> list[str]:
    """Return the duration, the price and the failures of a training as sentences."""
    median, low, high = found.median, found.quantile(0.1), found.quantile(0.9)
    price = f", at a price of {compact(found.price)}" if found.price else ""
    sentences = [
        f"The training takes {duration(median.total)} and {compact(found.device_hours)} device hours"
        f"{price}."
    ]
    if median.failures:
        sentences[0] += f" The goodput is {percent(found.goodput)}."
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


def trainings_on(
    asked: Training | None, best: Sequence[PlannedLayout], machine: Machine, tokens: int = 1
) -> list[TrainingEstimate]:
    """Return the estimates of a training in each layout; none if none is asked for."""
    return [] if asked is None else [training_estimate(asked, each, machine, tokens) for each in best]


def print_trainings(
    console: Console, layouts: Sequence[PlannedLayout], trainings: Sequence[TrainingEstimate]
) -> None:
    """Print the duration and the price of the training in each layout, and of the first by part."""
    heads, rows = training_table(layouts, trainings)
    print_rows(console, "Whole training", heads, rows, right=heads[1:])
    found = trainings[0]
    total = found.median.total
    bars = [(name, duration(value), bar(value / total)) for name, value in training_parts(found)]
    print_rows(console, "Training with the first", ("part", "time", ""), bars, right=("time",))
    print_line(console, " ".join(training_sentences(found)))


def check_values(found: RunCheck) -> dict[str, Any]:
    """Return a comparison with a run as plain values; durations in seconds."""
    return {
        "verdict": found.verdict,
        "layout": str(found.plan.layout),
        "micro_batch": found.plan.micro_batch,
        "steps": found.steps,
        "predicted_seconds": found.step.total,
        "measured_seconds": found.measured,
        "parts": [asdict(part) for part in found.parts],
    }


def check_rows(found: RunCheck) -> list[tuple[str, str, str]]:
    """Return the predicted and the measured time of each part, and of the step, as text."""
    rows = [
        (
            part.name,
            "not predicted" if part.predicted is None else duration(part.predicted),
            duration(part.measured),
        )
        for part in found.parts
    ]
    return [*rows, ("step", duration(found.step.total), duration(found.measured))]


def print_check(console: Console, found: RunCheck) -> None:
    """Print a comparison with a run: the verdict, then both times of each part."""
    print_line(console, found.verdict, "")
    title = f"{counted(found.steps, 'step')}, {found.plan.layout}"
    print_rows(console, title, CHECK_HEAD, check_rows(found), right=CHECK_HEAD[1:])


def bar(fraction: float) -> str:
    """Return a bar for a fraction, which may be above 1."""
    return "#" * max(1 if fraction > 0.001 else 0, round(_BAR * min(1.0, fraction)))
