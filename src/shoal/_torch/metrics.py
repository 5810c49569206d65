"""Private names of torchmetrics' Metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def reductions(metric: Any) -> Mapping[str, Callable[[Tensor], Tensor] | None] | None:
    """Return how the states of a metric are reduced over ranks; None for a collection of metrics.

    The public `sync` expects every rank to have seen samples, and exchanges the states by itself.
    """
    found: Mapping[str, Callable[[Tensor], Tensor] | None] | None = getattr(metric, "_reductions", None)
    return found


def mark_updated(metric: Any) -> None:
    """Mark `metric` as updated: `metric.compute` warns if only its states were set.

    Without the name the metric warns, and computes the same.
    """
    metric._update_count = max(1, metric.update_count)
