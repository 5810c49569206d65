"""Parameters of the time model from measured steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal.tools.plan.machine.machines import Efficiency, Machine, limited_efficiency
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer

Case = tuple[Transformer, PlannedStep, Machine]
_PRIOR = 0.02
"""The weight of a parameter's squared distance from its default, in the log error of one case."""


_SHARP = 0.02
"""Log errors below this count with their square, larger ones with their size."""


def fit_efficiency(
    cases: Sequence[Case], seconds: Sequence[float], names: Sequence[str], sweeps: int = 24
) -> Efficiency:
    """Return the efficiencies, of which `names` are fitted, with the least log errors.

    The pattern search of Hooke and Jeeves 1961 over logarithms, within the range of each parameter. A
    weak preference for the default keeps parameters in place that the cases say nothing about.
    """
    start = cases[0][2].efficiency

    def loss(efficiency: Efficiency) -> float:
        errors = 0.0
        for (model, plan, machine), measured in zip(cases, seconds, strict=True):
            found = estimate_step(model, plan, replace(machine, efficiency=efficiency)).total
            errors += math.hypot(math.log(found / measured), _SHARP)
        away = sum(math.log(getattr(efficiency, name) / getattr(start, name)) ** 2 for name in names)
        return (errors + _PRIOR * away) / len(cases)

    best, least, width = start, loss(start), 0.4
    for _ in range(sweeps):
        before = best
        best, least = _explored(best, least, names, width, loss)
        if best == before:
            width /= 2
            continue
        # The same change again, which follows a valley that no single parameter does.
        further = _limited(best, {name: getattr(best, name) / getattr(before, name) for name in names})
        if (found := loss(further)) < least:
            best, least = further, found
    return best


def _explored(
    best: Efficiency,
    least: float,
    names: Sequence[str],
    width: float,
    loss: Callable[[Efficiency], float],
) -> tuple[Efficiency, float]:
    """Return the best that changing each parameter in turn finds, with its loss."""
    for name in names:
        for direction in (width, -width):
            tried = _limited(best, {name: math.exp(direction)})
            if (found := loss(tried)) < least:
                best, least = tried, found
                break
    return best, least


def _limited(efficiency: Efficiency, factors: Mapping[str, float]) -> Efficiency:
    """Return efficiencies times factors, within the range of each."""
    values = {}
    for name, factor in factors.items():
        values[name] = limited_efficiency(name, getattr(efficiency, name) * factor)
    return replace(efficiency, **values)
