"""A machine on which a known step takes the time that was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine, limited_efficiency
from shoal.tools.plan.time.rates import peak_rate
from shoal.tools.plan.time.step_error import StepErrors, published_errors
from shoal.tools.plan.time.step_time import estimate_step
from shoal.tools.plan.work.divisions import check_division
from shoal.tools.plan.work.planned_step import FORMATS, RECOMPUTES, PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError

_COMPUTATION = ("product", "attention", "memory")
_LINKS = ("link", "network")
_PARTS = {
    "attention": ("attention",),
    "communication": _LINKS,
    "host": ("launch", "host"),
    "fp8": ("product",),
}
_SECONDS = ("launch", "host")
"""Efficiencies in seconds; the others are fractions of a rate."""
_EXAMPLE = '--known-step-time "7.4 layout=shard=8 batch=64 micro_batch=2"'
_NAMES = ("layout", "batch", "micro_batch", "recompute", "precision", "schedule", "stages")
_STEPS = 40
"""Halvings of the range of a logarithm."""
_FARTHEST = 1.5
"""The logarithm of the largest factor on a step."""
_LARGEST = 1.5
"""The largest difference between a known step and the machine that fits it."""


def moved_machine(
    machine: Machine, errors: StepErrors, fractions: Mapping[str, float], amount: float
) -> Machine:
    """Return a machine whose efficiencies are moved towards those of a measured step.

    A step that is slower than predicted has the most probable causes: each part by its variance times
    its fraction of the step, and all together by the variance of sources.

    Args:
        machine: The machine before.
        errors: Standard deviations.
        fractions: Those of the step (`StepErrors.fractions`), and `excess`, the variance of its source
            beyond that of published ones.
        amount: How far: 0 for not at all, positive for a slower machine.
    """
    every = errors.source**2 + errors.machine**2 * fractions["machine"]
    every += errors.parts["scale"] ** 2 * fractions["scale"] + fractions["excess"]
    powers = dict.fromkeys((*_COMPUTATION, *_LINKS, *_SECONDS), every)
    for part, names in _PARTS.items():
        for name in names:
            powers[name] += errors.parts[part] ** 2 * fractions[part]
    values = {}
    for name, power in powers.items():
        factor = math.exp(amount * power)
        before = getattr(machine.efficiency, name)
        values[name] = limited_efficiency(
            name, before * factor if name in _SECONDS else before / factor
        )
    return replace(machine, efficiency=replace(machine.efficiency, **values), known_step=fractions)


def known_machine(
    seconds_of: Callable[[Machine], float],
    machine: Machine,
    errors: StepErrors,
    fractions: Mapping[str, float],
    measured: float,
) -> Machine:
    """Return the machine that fits a measured step, except the error that this step has alone.

    If the step is farther from its prediction than published ones, its source is: the variance of the
    source is then the most probable one.
    """
    common, alone = errors.covariance(fractions, fractions), errors.alone(fractions)
    before = seconds_of(machine)
    error = math.log(measured / before)
    excess = max(0.0, error**2 - alone - common)
    fractions, common = {**fractions, "excess": excess}, common + excess
    target = before * math.exp(error * common / (common + alone))
    low, high = -_FARTHEST / common, _FARTHEST / common
    for _ in range(_STEPS):
        middle = (low + high) / 2
        slow = seconds_of(moved_machine(machine, errors, fractions, middle)) > target
        low, high = (low, middle) if slow else (middle, high)
    return moved_machine(machine, errors, fractions, low)


def machine_of_step(model: Transformer, plan: PlannedStep, machine: Machine, seconds: float) -> Machine:
    """Return the machine whose efficiencies fit a measured step.

    Args:
        model: The transformer that was trained.
        plan: How it was trained.
        machine: The machine without the measurement.
        seconds: The measured time of a step.

    Raises:
        ShoalError: If no plausible efficiency gives about this time.
    """
    step, errors = estimate_step(model, plan, machine), published_errors()

    def seconds_of(machine: Machine) -> float:
        return float(estimate_step(model, plan, machine).total)

    found = known_machine(seconds_of, machine, errors, errors.fractions(step, machine), seconds)
    if not 1 / _LARGEST < seconds / seconds_of(found) < _LARGEST:
        raise ShoalError(
            given=f"a known step of {seconds:.4g} s on {machine.name}",
            found=f"the predicted time is {step.total:.3g} s; no plausible efficiency gives this one",
            fix="check the time, and that model, layout, batch and machine are those of the step",
        )
    return found


def parse_known_step(text: str, model: Transformer, machine: Machine) -> tuple[PlannedStep, float]:
    """Return the step that `--known-step-time` describes, and its seconds.

    Args:
        text: Seconds, or an MFU such as `45%`, and `layout=…`, `batch=…`; also `micro_batch=…`
            (default: the local batch), `recompute=…`, `precision=…` (default: `mixed`), `schedule=…`
            and `stages=…` (those of a rank).
        model: The transformer of the step.
        machine: The machine, whose peak is that of an MFU.

    Raises:
        ShoalError: If the text describes no step.
    """
    time, *words = text.split() or [""]
    values = dict(word.partition("=")[::2] for word in words)
    if len(values) < len(words):
        raise _wrong(text, "a name appears twice")
    unknown = [name for name in values if name not in _NAMES]
    missing = [name for name in ("layout", "batch") if name not in values]
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(%|s)?", time)
    whole = all(values.get(name, "1").isdecimal() for name in ("batch", "micro_batch", "stages"))
    if unknown or missing or number is None or not float(number[1]) or not whole:
        found = f"{time!r} is not a time or an MFU" if number is None else "a number is not valid"
        found = f"{', '.join(missing)} missing" if missing else found
        raise _wrong(text, f"{unknown[0]!r} is not one of {', '.join(_NAMES)}" if unknown else found)
    recompute, precision = values.get("recompute", "none"), values.get("precision", "mixed")
    schedule = values.get("schedule", "1f1b")
    known = recompute in RECOMPUTES, precision in FORMATS, schedule in SCHEDULES
    if not all(known):
        names = f"recompute {recompute!r}, precision {precision!r} or schedule {schedule!r}"
        raise _wrong(text, f"{names} is unknown")
    machine.check_precision(precision)
    stages = int(values.get("stages", SCHEDULES[schedule].stages))
    layout = Layout.parse(values["layout"])
    if -1 in vars(layout).values():
        raise _wrong(text, f"the layout {layout} does not say on how many devices")
    if layout.pipeline == 1 and {"schedule", "stages"} & values.keys():
        raise _wrong(text, f"{layout} has no pipeline, whose schedule or stages these are")
    layout = layout.resolve(math.prod(max(1, each) for each in vars(layout).values()))
    batch = int(values["batch"])
    local = batch // layout.data_size
    micro = int(values.get("micro_batch", local))
    if not micro or batch % (layout.data_size * micro):
        raise _wrong(text, f"{layout} does not split {batch} samples into batches of {micro}")
    plan = PlannedStep(
        layout=layout,
        global_batch=batch,
        micro_batch=micro,
        recompute=next(each for each in RECOMPUTES if each == recompute),
        precision=precision,
        schedule=schedule,
        stages=stages if layout.pipeline > 1 else 1,
        sequence_parallel=layout.tensor > 1 and layout.pipeline == 1,
    )
    check_division(model, plan, f'--known-step-time "{text}"')
    seconds = float(number[1])
    if number[2] == "%":
        peak = float(peak_rate(plan, machine))
        seconds = model.flops(batch) / (seconds / 100 * peak * layout.size)
    return plan, seconds


def _wrong(text: str, found: str) -> ShoalError:
    return ShoalError(given=f'--known-step-time "{text}"', found=found, fix=f"use {_EXAMPLE}")
