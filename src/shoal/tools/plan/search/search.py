"""The best configurations of a training on a number of devices, out of all valid ones."""

from __future__ import annotations

import math
from bisect import insort

import numpy as np

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import estimate_memory
from shoal.tools.plan.search.candidates import Candidates, Integers, find_candidates
from shoal.tools.plan.search.prediction import Prediction, RejectedLayout, SearchResult
from shoal.tools.plan.time.pipeline_run import pipeline_bubble
from shoal.tools.plan.time.seconds import StepParts
from shoal.tools.plan.time.step_time import estimate_step, pass_seconds
from shoal.tools.plan.work.planned_step import ANY_PRECISION, FORMATS, PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError
from shoal.util.units import counted, size

_ROUNDING = 1e-9
"""The part of a bound that rounding may add."""


def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> Prediction:
    """Return the predicted memory and step time of a configuration; a pipeline is simulated."""
    passes = pass_seconds(model, plan, machine)
    time = estimate_step(model, plan, machine, passes)
    if plan.layout.pipeline > 1:
        bubble = pipeline_bubble(plan, model.layers, passes)
        time = StepParts({**time.parts, "bubble": bubble})
    memory = estimate_memory(model, plan)
    return Prediction(plan=plan, memory=memory, time=time, available=machine.available)


def search_plans(
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    *,
    precision: str = "mixed",
    top: int = 5,
) -> SearchResult:
    """Return the `top` fastest configurations that fit, and why the others are not among them.

    With the precision `"any"`, all are tried. The memory and the step times of all are computed as
    arrays. In a pipeline, ranks wait at least for the time in these, so they are lower bounds:
    configurations are predicted in their order, until the next bound is above the step times that were
    found.

    Raises ShoalError if no layout is valid. `best` is empty if none fits.
    """
    precisions = tuple(FORMATS) if precision == ANY_PRECISION else (precision,)
    candidates = find_candidates(model, machine, devices, batch, precisions)
    if not len(candidates.rows):
        raise _no_layout(model, devices, batch)
    memory = estimate_memory(model, candidates).total
    fitting = np.flatnonzero(memory <= machine.available)
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
        self.bounds = estimate_step(model, candidates, machine).total * (1 - _ROUNDING)
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


def _too_much(found: Prediction) -> str:
    kinds = found.memory.kinds
    largest = max(kinds, key=kinds.__getitem__)
    over = size(found.needed - found.available)
    return f"does not fit: {over} too much; {largest} {size(kinds[largest])}"


def _no_layout(model: Transformer, devices: int, batch: int) -> ShoalError:
    nearest = max(1, round(batch / devices)) * devices
    return ShoalError(
        given=f"{counted(devices, 'device')}, global batch {batch}",
        found=f"no layout splits {batch} samples, {model.layers} layers and {model.key_heads} heads "
        "evenly",
        fix=f"use a global batch size that can be split evenly, such as --batch {nearest}",
    )
