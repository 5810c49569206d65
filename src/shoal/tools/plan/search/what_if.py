"""Answers to "what if": the search again, with one property of the machine changed."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

from shoal.tools.plan.machine.machines import RANGES, Machine, find_machine
from shoal.tools.plan.search.prediction import Prediction, SearchResult
from shoal.tools.plan.search.search import search_plans
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError

RATES = ("half", "tf32", "fp32", "memory", "memory_bandwidth", "link", "network")
COMPUTATION = ("half", "tf32", "fp32", "memory_bandwidth")
QUESTIONS = tuple(dict.fromkeys(("machine", "slowest", *RATES, *RANGES)))
_FACTORS = (1e-3, 1e3)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A question, the fastest configuration under it, and how it differs from that of the search.

    `ratio` is its step time relative to that of the search, `part` the part of the step that changes
    most, `change` the seconds by which it does. All are None if no configuration fits.
    """

    question: str
    best: Prediction | None
    ratio: float | None = None
    part: str | None = None
    change: float | None = None


def changed_machine(machine: Machine, question: str) -> Machine:
    """Return `machine` with one change.

    Args:
        machine: The machine of the search.
        question: `machine=NAME` for another one; `slowest=1.2` for a device that computes 1.2 times
            slower than the others, for which each step waits; or a rate or an efficiency times a
            factor, such as `network=2x`.

    Raises:
        ShoalError: If the question is not one of these.
    """
    name, _, value = question.partition("=")
    if name not in QUESTIONS or not value:
        near = difflib.get_close_matches(name, QUESTIONS, n=1, cutoff=0.6)
        raise ShoalError(
            given=f"--what-if {question}",
            found=f"a question is one of {', '.join(QUESTIONS)}, with a value",
            fix=f"use --what-if {near[0]}=…, such as network=2x or machine=h200"
            if near
            else "use --what-if network=2x, or machine=h200",
        )
    if name == "machine":
        return find_machine(value)
    factor = _factor(question, value)
    if name == "slowest":
        return _times(machine, COMPUTATION, 1 / factor)
    if name in RATES:
        return _times(machine, (name,), factor)
    low, high = RANGES[name]
    changed = getattr(machine.efficiency, name) * factor
    if not low <= changed <= high:
        raise ShoalError(
            given=f"--what-if {question}",
            found=f"{name} would be {changed:.3g}; it is between {low:g} and {high:g}",
            fix="use a factor within this range",
        )
    return replace(machine, efficiency=replace(machine.efficiency, **{name: changed}))


def answer_what_if(
    question: str,
    base: SearchResult,
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    *,
    precision: str,
) -> WhatIf:
    """Return the fastest configuration with one change, compared with that of the search."""
    changed = changed_machine(machine, question)
    result = search_plans(model, changed, devices, batch, precision=precision, top=1)
    if not result.best or not base.best:
        return WhatIf(question=question, best=result.best[0] if result.best else None)
    best, before = result.best[0], base.best[0]
    ours, theirs = best.time.parts, before.time.parts
    part = max(ours, key=lambda name: abs(ours[name] - theirs[name]))
    return WhatIf(
        question=question,
        best=best,
        ratio=best.step_seconds / before.step_seconds,
        part=part,
        change=ours[part] - theirs[part],
    )


def _factor(question: str, text: str) -> float:
    slowest = question.startswith("slowest=")
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = math.nan
    low, high = 1.0 if slowest else _FACTORS[0], _FACTORS[1]
    if not low <= factor <= high or not (slowest or text.endswith("x")):
        raise ShoalError(
            given=f"--what-if {question}",
            found=f"it is not a factor from {low:g} to {high:g}" + ("" if slowest else ", with x"),
            fix="use a factor, such as --what-if network=2x or --what-if slowest=1.2",
        )
    return factor


def _times(machine: Machine, names: tuple[str, ...], factor: float) -> Machine:
    values = {name: getattr(machine, name) for name in names}
    return replace(machine, **{name: value * factor for name, value in values.items() if value})
