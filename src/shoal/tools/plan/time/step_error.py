"""How far measured steps are from predicted ones: bands, and what a known step says about others.

The logarithm of measured over predicted time is a sum of normal values: of the source (one framework on
one cluster), of the parts of a step that the source makes slower, of a machine without published steps,
and of the step itself. `step_errors.toml` has their standard deviations, derived from published tables
by `benchmarks/plan_accuracy.py`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

from shoal.tools.plan.machine.machines import Machine, machine_catalogue
from shoal.tools.plan.time.step_time import StepParts

COVERED = 0.8
"""The part of measured steps in a band."""
_QUANTILE = 1.2816
_REASONS = {
    "host": "layers this small wait for the host",
    "communication": "most of the step is communication",
    "attention": "most of the step is attention",
    "fp8": "steps in FP8 differ in their casts and scales",
    "scale": "clusters with this many devices differ",
}
PARTS: Mapping[str, tuple[str, ...]] = {
    "host": ("launch",),
    "communication": ("tensor", "context", "experts", "imbalance", "pipeline", "data"),
    "attention": ("attention",),
    "fp8": ("fp8",),
    "scale": (),
}
"""The parts of a step with an uncertainty of their own, and how `StepParts` names them. `scale` is that
of many devices: the decimal logarithm of their number, from _SMALL."""
_SMALL = 64


@dataclass(frozen=True, kw_only=True)
class StepErrors:
    """Standard deviations of the logarithm of measured over predicted time.

    `source` is that of sources, `step` of the steps of one source, `machine` of machines without
    published steps, and `parts` of the parts of a step, for a step that has only this part. `sources`
    is the number of sources, `machines` those with published steps.
    """

    source: float
    step: float
    machine: float
    parts: Mapping[str, float]
    sources: int
    machines: tuple[str, ...]

    def covariance(self, one: Mapping[str, float], other: Mapping[str, float]) -> float:
        """Return the covariance of two steps of one source, by the fractions of their parts."""
        common = (self.parts[name] ** 2 * one[name] * other[name] for name in self.parts)
        return self.source**2 + sum(common) + self.machine**2 * one["machine"] * other["machine"]

    def alone(self, one: Mapping[str, float]) -> float:
        """Return the variance that a step has alone: half of the errors of the host and of FP8."""
        return self.step**2 + sum((self.parts[name] / 2 * one[name]) ** 2 for name in ("host", "fp8"))

    def variance(self, one: Mapping[str, float], known: Mapping[str, float] | None = None) -> float:
        """Return the variance of a step, also of one whose source has a known step."""
        common = self.covariance(one, one)
        if known is not None:
            excess = known["excess"]
            total = self.covariance(known, known) + excess + self.alone(known)
            common += excess - (self.covariance(one, known) + excess) ** 2 / total
        return common + self.alone(one)

    def fractions(self, step: StepParts, machine: Machine) -> dict[str, float]:
        """Return by which fraction of its own change each part changes a step.

        `machine` is 1 without published steps, as of all models with experts.
        """
        total = float(step.total)
        found = {
            name: sum(float(step.parts.get(each, 0.0)) for each in own) / total
            for name, own in PARTS.items()
        }
        # Layers take (device^4 + host^4)^(1/4), which is how much of a step follows the host.
        found["host"] = 1 - (1 - found["host"]) ** 4
        found["scale"] = math.log10(max(step.devices, _SMALL) / _SMALL)
        return found | {"machine": float("experts" in step.parts or not self.knows(machine))}

    def knows(self, machine: Machine) -> bool:
        """Return whether steps are published of a machine with the same processors."""
        known = ((each.half, each.units) for each in map(_catalogue().get, self.machines) if each)
        return (machine.half, machine.units) in known


@dataclass(frozen=True)
class StepBand:
    """Seconds between which 80 % of measured steps are expected, and why they are far apart."""

    low: float
    high: float
    reasons: tuple[str, ...] = field(default=())


@lru_cache
def _catalogue() -> Mapping[str, Machine]:
    return machine_catalogue()


@lru_cache
def published_errors() -> StepErrors:
    """Return the errors of published steps."""
    text = resources.files(__package__).joinpath("step_errors.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    return StepErrors(**{**values, "machines": tuple(values["machines"])})


def step_band(step: StepParts, machine: Machine, errors: StepErrors | None = None) -> StepBand:
    """Return the band of a predicted step.

    Args:
        step: The predicted step.
        machine: The machine for which it was predicted.
        errors: Standard deviations. Default: those of published steps.
    """
    errors = errors or published_errors()
    fractions = errors.fractions(step, machine)
    variance = errors.variance(fractions, machine.known_step)
    width = quantile(errors.sources) * math.sqrt(variance)
    reasons = []
    if machine.known_step is None:
        if fractions["machine"]:
            what = "step with experts" if "experts" in step.parts else f"step on {machine.name}"
            reasons.append(f"no {what} is published")
        large = [name for name in errors.parts if fractions[name] * errors.parts[name] > errors.source]
        reasons += [_REASONS[name] for name in large]
    total = float(step.total)
    return StepBand(total * math.exp(-width), total * math.exp(width), tuple(reasons))


def quantile(sources: int) -> float:
    """Return the distance of the edges of a band, in standard deviations.

    Student's t, whose degrees of freedom are one below the number of sources: Fisher's expansion.
    """
    normal = _QUANTILE
    return normal + (normal**3 + normal) / (4 * max(1, sources - 1))
