"""The constants of `shoal plan` that follow from published steps, and predictions without a table."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plan_tables import Row
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.time.known_step import known_machine
from shoal.tools.plan.time.step_error import PARTS, StepErrors, published_errors, quantile
from shoal.tools.plan.time.step_time import OVERHEAD, StepParts, estimate_step

LIMITED = ("h100-sxm", "h200", "b200", "b300", "gb200", "gb300")
"""Devices whose clock falls at the limit of power in long runs."""
SUSTAINED = find_machine(LIMITED[0]).efficiency.product
"""The present efficiency of products of the first of them."""
MOST = 60
"""Rows of a table that are fitted on; the others of a table say little more."""
PRIOR: Mapping[str, float] = {
    "source": 0.07,
    "step": 0.05,
    "host": 0.22,
    "communication": 0.15,
    "attention": 0.15,
    "fp8": 0.3,
    "scale": 0.07,
}
"""Standard deviations before any table is seen, each known up to a factor of about two. On 12,288 A100,
two frameworks differ by 1.34 (Jiang et al. 2024, arXiv:2402.15627)."""
UNKNOWN = 0.15
"""That of a machine without rows: the H100 differs by 0.2 from its fastest product, the A100 by 0."""
FITTED = ("source", "step", "communication", "attention")
"""Those that are derived from tables. One table can't tell that of the host, of FP8 or of scale."""
_DOUBT = math.log(1.4)
_GRID = np.exp(np.linspace(-1.2, 1.2, 13))


HOST = 35e-6
"""Seconds of the host for one operation, without a table of steps that wait for it."""
_WAITING = 0.5
"""The median fraction `host` from which a table is one of steps that wait for the host."""
_OUTLIER = 0.1
"""Distances from the median of a table above which a row counts as one at this distance."""


Vector = npt.NDArray[np.float64]


class Rates(NamedTuple):
    """Efficiencies that are derived from tables: products at the limit of power, and the host."""

    sustained: float
    host: float


class Constants(NamedTuple):
    """The constants from tables: `step_time.OVERHEAD`, rates in `machines.toml`, `StepErrors`."""

    rates: Rates
    overhead: float
    errors: StepErrors


@dataclass(frozen=True)
class Measured:
    """A row, and its prediction with any overhead."""

    row: Row
    step: StepParts

    @cached_property
    def computing(self) -> float:
        """Seconds that the overhead lengthens."""
        return float(self.step.parts["overhead"]) / OVERHEAD

    def predicted(self, overhead: float) -> float:
        """Return the predicted seconds."""
        return float(self.step.total) + (overhead - OVERHEAD) * self.computing

    def error(self, overhead: float) -> float:
        """Return the logarithm of measured over predicted time."""
        return math.log(self.row.seconds / self.predicted(overhead))


def recomputing_step(row: Row, machine: Machine) -> StepParts:
    """Return the predicted step of a row, of which a part is recomputed."""
    plain = estimate_step(row.model, row.plan, machine)
    if not row.recomputed:
        return plain
    full = estimate_step(row.model, replace(row.plan, recompute="full"), machine)
    part = row.recomputed
    return StepParts.of(
        plain.devices,
        **{name: own + part * (full.parts[name] - own) for name, own in plain.parts.items()},
    )


def with_rates(machine: Machine, rates: Rates) -> Machine:
    """Return a machine with these efficiencies."""
    own = replace(machine.efficiency, host=rates.host)
    if machine.name in LIMITED:
        own = replace(own, product=own.product * rates.sustained / SUSTAINED)
    return replace(machine, efficiency=own)


def measured_rows(rows: Sequence[Row], rates: Rates) -> list[Measured]:
    """Return rows with their predictions."""
    machines = (with_rates(row.machine, rates) for row in rows)
    return [Measured(row, recomputing_step(row, own)) for row, own in zip(rows, machines, strict=True)]


def sample(rows: Sequence[Row]) -> list[Row]:
    """Return up to `MOST` rows of a table."""
    return random.Random(0).sample(list(rows), min(MOST, len(rows)))


def derive(tables: Mapping[str, Sequence[Row]]) -> Constants:
    """Return the constants from some tables, without those in FP8."""
    few = {name: sample(rows) for name, rows in tables.items() if not rows[0].plan.numbers.fp8}
    limited = [rows for rows in few.values() if rows[0].machine.name in LIMITED]
    others = [rows for rows in few.values() if rows[0].machine.name not in LIMITED]
    rates = Rates(SUSTAINED, HOST)
    waiting = [rows for rows in others if _waits(measured_rows(rows, rates))]

    def errors(tables: Sequence[Sequence[Row]], rates: Rates, overhead: float) -> float:
        return _middle([measured_rows(rows, rates) for rows in tables], overhead)

    if waiting:
        host = _root(lambda value: errors(waiting, rates._replace(host=value), OVERHEAD), 5e-6, 1e-4)
        rates = rates._replace(host=host)
    eager = [measured_rows(rows, rates) for rows in others if rows[0].plan.eager]
    overhead = _root(lambda value: _middle(eager, value), 0.0, 0.3)
    if limited:
        found = _root(
            lambda value: -errors(limited, rates._replace(sustained=value), overhead), 0.3, 1.0
        )
        rates = rates._replace(sustained=found)
    every = [measured_rows(rows, rates) for rows in few.values()]
    machines = tuple(sorted({rows[0].machine.name for rows in few.values()}))
    return Constants(rates, overhead, _errors(every, overhead, machines))


def _waits(rows: Sequence[Measured]) -> bool:
    """Return whether most steps of a table wait for the host."""
    errors = published_errors()
    found = (errors.fractions(each.step, each.row.machine)["host"] for each in rows)
    return statistics.median(found) > _WAITING


def _middle(tables: Sequence[Sequence[Measured]], overhead: float) -> float:
    """Return the mean over tables of their median errors."""
    medians = (statistics.median(each.error(overhead) for each in rows) for rows in tables)
    return statistics.mean(medians)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function is zero."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def _errors(
    tables: Sequence[Sequence[Measured]], overhead: float, machines: tuple[str, ...]
) -> StepErrors:
    """Return the standard deviations that are most probable, each parameter in turn on a grid."""
    found = dict(PRIOR)
    data = []
    for rows in tables:
        fractions = [
            _errors_of(found, machines, len(tables)).fractions(each.step, each.row.machine)
            for each in rows
        ]
        columns = np.array([[1.0, *(own[name] for name in PARTS)] for own in fractions])
        data.append((columns, _without_outliers([each.error(overhead) for each in rows])))

    def cost(values: Mapping[str, float]) -> float:
        away = sum(math.log(values[name] / PRIOR[name]) ** 2 for name in FITTED) / _DOUBT**2
        return away - 2 * sum(_likelihood(columns, errors, values) for columns, errors in data)

    for _ in range(3):
        for name in FITTED:
            tried = [{**found, name: PRIOR[name] * float(factor)} for factor in _GRID]
            found = min(tried, key=cost)
    return _errors_of(found, machines, len(tables))


def _without_outliers(errors: Sequence[float]) -> Vector:
    middle = statistics.median(errors)
    found: Vector = np.clip(np.array(errors), middle - _OUTLIER, middle + _OUTLIER)
    return found


def _errors_of(values: Mapping[str, float], machines: tuple[str, ...], sources: int) -> StepErrors:
    return StepErrors(
        source=values["source"],
        step=values["step"],
        machine=UNKNOWN,
        parts={name: values[name] for name in PARTS},
        sources=sources,
        machines=machines,
    )


def _likelihood(columns: Vector, errors: Vector, values: Mapping[str, float]) -> float:
    """Return the logarithm of the density of the errors of one table."""
    scale = np.array([values["source"], *(values[name] for name in PARTS)])
    alone = values["step"] ** 2 + (values["host"] / 2 * columns[:, 1]) ** 2
    covariance = (columns * scale**2) @ columns.T + np.diag(alone)
    _, logarithm = np.linalg.slogdet(covariance)
    return -0.5 * float(logarithm + errors @ np.linalg.solve(covariance, errors))


class Judged(NamedTuple):
    """A row that was predicted: its error, and the half-width of its band, as logarithms."""

    error: float
    width: float


def judge(row: Measured, known: Constants) -> Judged:
    """Return the error and the band of a prediction by constants."""
    errors = known.errors
    own = errors.fractions(row.step, row.row.machine)
    width = quantile(errors.sources) * math.sqrt(errors.variance(own))
    return Judged(row.error(known.overhead), width)


def judge_known(rows: Sequence[Measured], given: Measured, known: Constants) -> list[Judged]:
    """Return the same of rows of a table, of which one step is known."""
    errors, overhead = known.errors, known.overhead
    machine, row = with_rates(given.row.machine, known.rates), given.row

    def seconds_of(machine: Machine) -> float:
        return Measured(row, recomputing_step(row, machine)).predicted(overhead)

    fractions = errors.fractions(given.step, row.machine)
    found = known_machine(seconds_of, machine, errors, fractions, row.seconds)
    judged = []
    for each in rows:
        # Rows of one table may have other networks, and their own limits of power.
        rates = {
            name: value * getattr(found.efficiency, name) / getattr(machine.efficiency, name)
            for name, value in vars(with_rates(each.row.machine, known.rates).efficiency).items()
        }
        own = replace(each.row.machine, efficiency=replace(found.efficiency, **rates))
        error = Measured(each.row, recomputing_step(each.row, own)).error(overhead)
        fractions = errors.fractions(each.step, each.row.machine)
        width = quantile(errors.sources) * math.sqrt(errors.variance(fractions, found.known_step))
        judged.append(Judged(error, width))
    return judged
