"""Seconds of a step by part, when a rank computes what, and how far measured steps are from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from shoal.tools.plan.work.planned_step import PlannedStep, Quantity

_PASSES = ("products", "convolutions", "attention", "memory", "recompute", "launch")


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step by part. They add up to `total`.

    `memory` are element-wise operations and the operands of products, `launch` is the time between
    operations and for the host, `bubble` the waiting for other pipeline stages, `stragglers` that for
    the slowest device, and `data` the gradients and gathered parameters that no computation hides.
    """

    parts: Mapping[str, Quantity]

    @classmethod
    def of(cls, **parts: Quantity) -> StepParts:
        """Return numbers, or arrays of several plans, by name."""
        return cls({name: one if np.ndim(one) else float(one) for name, one in parts.items()})

    @property
    def total(self) -> Quantity:
        """All seconds."""
        return sum(self.parts.values())

    @property
    def measured_parts(self) -> dict[str, float]:
        """The seconds by the parts that a run measures."""
        passes = sum(self.parts.get(name, 0.0) for name in _PASSES)
        optimizer = self.parts["optimizer"]
        return {
            "forward and backward": passes,
            "optimizer": optimizer,
            "communication and waiting": sum(
                value for name, value in self.parts.items() if name not in (*_PASSES, "optimizer")
            ),
        }


class Span(NamedTuple):
    """Seconds of a step in which a rank computes something, such as "forward"."""

    kind: str
    start: float
    end: float


def add_span(spans: list[Span], new: Span) -> None:
    """Add a span, or lengthen the last one if it is of the same kind and nothing lies between."""
    last = spans[-1] if spans else None
    if last is not None and last.kind == new.kind and last.end == new.start:
        spans[-1] = last._replace(end=new.end)
    elif new.end > new.start:
        spans.append(new)


StepKind = Literal["compute", "sharded", "communication", "host"]

_HOST, _COMMUNICATION = 0.1, 0.15
"""The part of a step above which it counts as one that waits for the host, or communicates."""

BANDS: Mapping[StepKind, tuple[float, float]] = {
    "compute": (0.96, 1.11),
    "sharded": (1.06, 1.17),
    "communication": (0.97, 1.19),
    "host": (0.98, 1.56),
}
"""Measured time / predicted time of 80 % of published steps (benchmarks/plan_accuracy.py)."""


def step_kind(plan: PlannedStep, step: StepParts) -> StepKind:
    """Return what most of the error of a step depends on: the host, FSDP, communication, computing."""
    if step.parts["launch"] > _HOST * step.total:
        return "host"
    if plan.layout.shard > 1:
        return "sharded"
    between = sum(step.parts[name] for name in ("tensor", "context", "bubble", "pipeline", "data"))
    return "communication" if between > _COMMUNICATION * step.total else "compute"


def step_band(plan: PlannedStep, step: StepParts) -> tuple[float, float]:
    """Return the seconds between which 80 % of the measurements of such steps are."""
    low, high = BANDS[step_kind(plan, step)]
    return low * step.total, high * step.total
