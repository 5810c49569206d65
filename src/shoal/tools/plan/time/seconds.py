"""Seconds of a step by part, and when a rank computes what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.tools.plan.work.segments import Quantity

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
