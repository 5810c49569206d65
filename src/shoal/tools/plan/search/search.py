"""The best configurations of a training on a number of devices, out of all valid ones.

Predictions are those of a transformer by its dimensions, or of a traced module. To answer "what if",
the search is repeated with one property of the machine changed.
"""

from __future__ import annotations

import difflib
import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.distributed.layout import AXES, Layout
from shoal.tools.plan.machine.machines import RANGES, Machine, find_machine
from shoal.tools.plan.memory.estimate import PUBLISHED_MARGIN, RankMemory, estimate_memory
from shoal.tools.plan.search.candidates import (
    MIXED,
    Candidates,
    FixedOptions,
    Integers,
    find_candidates,
)
from shoal.tools.plan.time.simulation import CollectiveTotal, RankRun
from shoal.tools.plan.time.step_time import StepParts, bound_step, estimate_step
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError
from shoal.util.units import counted, duration, percent, size


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan with the predicted memory and step time of the rank that needs most memory.

    `change` says how the plan differs from the given one. `memories` and `runs` are those of the traced
    ranks of one replica, in the order of the pipeline; the rank is the one at `place`, and
    `collectives` are its own. `margin` is the number of bytes that a training may need in addition,
    `imbalance` the number of tokens of the busiest rank's experts, relative to the mean.
    """

    plan: PlannedStep
    memory: RankMemory
    time: StepParts
    available: float
    change: str = "as given"
    margin: int = 0
    imbalance: float = 1.0
    place: int = 0
    memories: tuple[RankMemory, ...] = ()
    runs: tuple[RankRun, ...] = ()
    collectives: Mapping[str, CollectiveTotal] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: those of the slowest rank."""
        return float(max((each.time.total for each in self.runs), default=self.time.total))

    @property
    def needed(self) -> float:
        """Bytes that the device must have: with what torch's allocator loses, and the margin."""
        return (self.memory.reserved or self.memory.total) + self.margin

    @property
    def fits(self) -> bool:
        """Whether the machine has them."""
        return self.needed <= self.available

    @property
    def tight(self) -> bool:
        """Whether the machine has them without the margin only."""
        return not self.fits and self.needed - self.margin <= self.available

    @property
    def verdict(self) -> str:
        """A sentence: whether it fits, and by how much."""
        rest = self.available - self.needed
        if self.tight:
            return f"is {_tight(self)}"
        of = f"{size(self.needed)} of {size(self.available)}"
        return f"fits: {of}, {size(rest)} free" if self.fits else f"does not fit: {of}"

    @property
    def family(self) -> str:
        """The axes in use, such as `shard+tensor`."""
        return "+".join(axis for axis in AXES if self.plan.layout.degree(axis) > 1) or "one device"

    @property
    def order(self) -> tuple[float, float]:
        """The place among other predictions: the fastest first."""
        return self.step_seconds, self.needed

    def slower_than(self, fastest: Prediction) -> str:
        """Return by how much a step is slower, and the part that takes longer."""
        slow, fast = self.time.parts, fastest.time.parts
        part = max(slow, key=lambda name: slow[name] - fast[name])
        ratio = self.time.total / fastest.time.total - 1
        more = duration(slow[part] - fast[part])
        return f"{percent(ratio, tenths=True)} slower: {more} more of {part}"


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """A layout that is not among the fastest, why, and its best prediction, if there is one."""

    layout: Layout
    reason: str
    best: Prediction | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest predictions that fit, and layouts with other axes.

    Of `tried` configurations, `fitting` fit, and `evaluated` were not ruled out by lower bounds.
    """

    best: tuple[Prediction, ...]
    rejected: tuple[RejectedLayout, ...]
    tried: int
    fitting: int
    evaluated: int


@dataclass(frozen=True, kw_only=True)
class TriedLayout:
    """A layout with the predicted and the measured seconds of a step, or the end of a failed run."""

    layout: str
    predicted: float
    measured: float | None
    problem: str = ""


_ROUNDING = 1e-9
"""The part of a bound that rounding may add."""


def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> Prediction:
    """Return the predicted memory and step time of a configuration; a pipeline is simulated."""
    memory = estimate_memory(model, plan)
    return Prediction(
        plan=plan,
        memory=memory,
        time=estimate_step(model, plan, machine),
        available=machine.available,
        margin=round(PUBLISHED_MARGIN * memory.total),
    )


def search_plans(
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    fixed: FixedOptions = MIXED,
    *,
    top: int = 5,
) -> SearchResult:
    """Return the `top` fastest configurations that fit, and why the others are not among them.

    All have the options that are `fixed`. The memory and the step times of all are computed as
    arrays. In a pipeline, ranks wait at least for the time in these, so they are lower bounds:
    configurations are predicted in their order, until the next bound is above the step times that were
    found.

    Raises ShoalError if no configuration is valid. `best` is empty if none fits.
    """
    candidates = find_candidates(model, machine, devices, batch, fixed)
    if not len(candidates.rows):
        raise _no_configuration(model, machine, devices, batch, fixed)
    memory = estimate_memory(model, candidates).total
    fitting = np.flatnonzero((1 + PUBLISHED_MARGIN) * memory <= machine.available)
    chosen = _Screened(model, machine, candidates.where(fitting))
    best = chosen.fastest(np.arange(len(fitting)), top)
    rejected = []
    shown = {each.family for each in best}
    families = candidates.families
    for family in np.unique(families).tolist():
        found = chosen.fastest(np.flatnonzero(families[fitting] == family), 1)
        if not found:
            least = np.where(families == family, memory, math.inf).argmin()
            closest = predict(model, candidates.plan(int(least)), machine)
            rejected.append(_rejected(closest, _too_much(closest)))
        elif found[0].family not in shown:
            rejected.append(_rejected(found[0], found[0].slower_than(best[0])))
    # Plain strategies first: they are the ones that a user asks about.
    rejected.sort(key=lambda each: (len(str(each.layout).split(",")), "does not fit" in each.reason))
    return SearchResult(
        best=tuple(best),
        rejected=tuple(rejected),
        tried=len(candidates.rows),
        fitting=len(fitting),
        evaluated=len(chosen.predicted),
    )


class _Screened:
    """Configurations that fit, with lower bounds on their step times."""

    def __init__(self, model: Transformer, machine: Machine, candidates: Candidates) -> None:
        self._model, self._machine, self._candidates = model, machine, candidates
        self.bounds = bound_step(model, candidates, machine).total * (1 - _ROUNDING)
        self.predicted: dict[int, Prediction] = {}

    def fastest(self, numbers: Integers, top: int) -> list[Prediction]:
        """Return the `top` fastest of some configurations."""
        found: list[Prediction] = []
        for number in numbers[np.argsort(self.bounds[numbers], kind="stable")].tolist():
            if len(found) == top and self.bounds[number] > found[-1].step_seconds:
                break
            if number not in self.predicted:
                plan = self._candidates.plan(number)
                self.predicted[number] = predict(self._model, plan, self._machine)
            insort(found, self.predicted[number], key=lambda each: each.order)
            del found[top:]
        return found


def _rejected(found: Prediction, reason: str) -> RejectedLayout:
    return RejectedLayout(layout=found.plan.layout, reason=reason, best=found)


def _tight(found: Prediction) -> str:
    needed = size(found.needed)
    return f"tight: {size(found.needed - found.margin)} of {size(found.available)}, up to {needed}"


def _too_much(found: Prediction) -> str:
    if found.tight:
        return _tight(found)
    kinds = found.memory.kinds
    largest = max(kinds, key=kinds.__getitem__)
    over = size(found.needed - found.available)
    return f"does not fit: {over} too much; {largest} {size(kinds[largest])}"


def _no_configuration(
    model: Transformer, machine: Machine, devices: int, batch: int, fixed: FixedOptions
) -> ShoalError:
    """Return the error of options that no configuration has, with values of one that would help."""
    given = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(fixed).items()
        if value and name != "precision"
    ]
    for name in ("micro_batch", "recompute", "schedule", "stages"):
        unset = {name: None}
        free = replace(fixed, **unset)  # type: ignore[arg-type]
        others = find_candidates(model, machine, devices, batch, free)
        if name in ("schedule", "stages"):
            others = others.where(others.columns["piped"] > 0)
        if len(others.rows):
            values = " or ".join(map(str, np.unique(getattr(others, name))[:8]))
            return ShoalError(
                given=f"{' '.join(given)} -n {devices} --batch {batch}",
                found="no configuration that Shoal can run has these options",
                fix=f"use --{name.replace('_', '-')} {values}",
            )
    if fixed.schedule or fixed.stages:
        return ShoalError(
            given=f"{' '.join(given)} -n {devices} --batch {batch}",
            found="no layout with a pipeline is valid",
            fix="leave --schedule and --stages out, or change the number of devices or the batch",
        )
    nearest = max(1, round(batch / devices)) * devices
    return ShoalError(
        given=f"{counted(devices, 'device')}, global batch {batch}",
        found=f"no layout splits {batch} samples and {model.key_heads} heads evenly",
        fix=f"use a global batch size that can be split evenly, such as --batch {nearest}",
    )


COMPUTATION = ("half", "fp8", "tf32", "fp32", "memory_bandwidth")
RATES = (*COMPUTATION, "memory", "link", "network")
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
        if getattr(machine, name) is None:
            raise ShoalError(
                given=f"--what-if {question}",
                found=f"{machine.name} has no rate {name}",
                fix="leave it out, or use a machine file with this rate",
            )
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
    fixed: FixedOptions = MIXED,
) -> WhatIf:
    """Return the fastest configuration with one change, compared with that of the search."""
    changed = changed_machine(machine, question)
    result = search_plans(model, changed, devices, batch, fixed, top=1)
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
