"""The best configurations of a training on a number of devices, out of all valid ones."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from shoal.distributed.layout import AXES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import MemoryEstimate, estimate_memory
from shoal.tools.plan.search.bounds import memory_bytes, step_bounds
from shoal.tools.plan.search.candidates import Candidates, Integers, find_candidates
from shoal.tools.plan.time.pipeline_run import run_pipeline
from shoal.tools.plan.time.step_time import StepEstimate, estimate_step
from shoal.tools.plan.work.configuration import ANY_PRECISION, FORMATS, PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError
from shoal.util.units import counted, duration, percent, size


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A configuration with its predicted memory and step time."""

    plan: PlannedStep
    memory: MemoryEstimate
    step: StepEstimate

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of an optimizer step."""
        return self.step.total

    @property
    def family(self) -> str:
        """The axes in use, such as `shard+tensor`."""
        return "+".join(axis for axis in AXES if self.plan.layout.degree(axis) > 1) or "one device"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest predictions that fit, and for each other set of axes its best one.

    `evaluated` is the number of configurations whose lower bounds did not rule them out.
    """

    best: tuple[Prediction, ...]
    rejected: tuple[tuple[Prediction, str], ...]
    tried: int
    fitting: int
    evaluated: int


def predict(model: Transformer, plan: PlannedStep, machine: Machine) -> Prediction:
    """Return the predicted memory and step time of a configuration; a pipeline is simulated."""
    memory, step = estimate_memory(model, plan), estimate_step(model, plan, machine)
    if plan.layout.pipeline > 1:
        run = run_pipeline(model, plan, machine)
        memory = estimate_memory(model, plan, held=run.held)
        step = replace(step, bubble=run.bubble)
    return Prediction(plan=plan, memory=memory, step=step)


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

    With the precision `"any"`, all are tried. Configurations are predicted in the order of their lower
    bounds, until the next bound is above the step times that were found.

    Raises ShoalError if no layout is valid. `best` is empty if none fits.
    """
    precisions = tuple(FORMATS) if precision == ANY_PRECISION else (precision,)
    candidates = find_candidates(model, machine, devices, batch, precisions)
    if not len(candidates.rows):
        raise _no_layout(model, devices, batch)
    memory = memory_bytes(model, candidates)
    fits = memory <= machine.available
    chosen = _Screened(model, machine, candidates.where(fits))
    best = chosen.fastest(np.arange(len(chosen.bounds)), top)
    rejected = []
    shown = {each.family for each in best}
    families = candidates.families
    for family in np.unique(families).tolist():
        found = chosen.fastest(np.flatnonzero(families[fits] == family), 1)
        if found and found[0].family not in shown:
            rejected.append((found[0], slower_by(asdict(found[0].step), asdict(best[0].step))))
        if not found:
            least = np.where(families == family, memory, math.inf).argmin()
            closest = predict(model, candidates.plan(int(least)), machine)
            rejected.append((closest, _too_much(closest, machine)))
    # Plain strategies first: they are the ones that a user asks about.
    rejected.sort(key=lambda pair: (pair[0].family.count("+"), "does not fit" in pair[1]))
    return SearchResult(
        best=tuple(best),
        rejected=tuple(rejected),
        tried=len(candidates.rows),
        fitting=int(fits.sum()),
        evaluated=len(chosen.predicted),
    )


class _Screened:
    """Configurations that fit, with lower bounds on their step times."""

    def __init__(self, model: Transformer, machine: Machine, candidates: Candidates) -> None:
        self._model, self._machine, self._candidates = model, machine, candidates
        empty = not len(candidates.rows)
        self.bounds = np.empty(0) if empty else step_bounds(model, machine, candidates)
        self.predicted: dict[int, Prediction] = {}

    def fastest(self, numbers: Integers, top: int) -> list[Prediction]:
        """Return the `top` fastest of some configurations."""
        found: list[Prediction] = []
        for number in numbers[np.argsort(self.bounds[numbers], kind="stable")].tolist():
            if len(found) == top and self.bounds[number] > found[-1].step.total:
                break
            predicted = self._predict(number)
            if predicted.memory.total <= self._machine.available:
                insort(found, predicted, key=_order)
                del found[top:]
        return found

    def _predict(self, number: int) -> Prediction:
        if number not in self.predicted:
            plan = self._candidates.plan(number)
            self.predicted[number] = predict(self._model, plan, self._machine)
        return self.predicted[number]


def _order(found: Prediction) -> tuple[float, float]:
    return found.step.total, found.memory.total


def _too_much(found: Prediction, machine: Machine) -> str:
    over = found.memory.total - machine.available
    kinds = asdict(found.memory)
    largest = max(kinds, key=kinds.__getitem__)
    return f"does not fit: {size(over)} too much; {largest} {size(kinds[largest])}"


def slower_by(slow: Mapping[str, float], fast: Mapping[str, float]) -> str:
    """Return by how much a step of these seconds is slower, and the part that takes longer."""
    part = max(slow, key=lambda name: slow[name] - fast[name])
    ratio = sum(slow.values()) / sum(fast.values()) - 1
    more = duration(slow[part] - fast[part])
    return f"{percent(ratio, tenths=True)} slower: {more} more of {part}"


def _no_layout(model: Transformer, devices: int, batch: int) -> ShoalError:
    nearest = max(1, round(batch / devices)) * devices
    return ShoalError(
        given=f"{counted(devices, 'device')}, global batch {batch}",
        found=f"no layout splits {batch} samples, {model.layers} layers and {model.key_heads} heads "
        "evenly",
        fix=f"use a global batch size that can be split evenly, such as --batch {nearest}",
    )
