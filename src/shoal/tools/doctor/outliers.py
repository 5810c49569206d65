"""Detection of slow devices or links among many that should have the same speed."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

NOTABLE = 0.75
"""Fraction of the others' rate below which something may be slow."""

HALF = 0.5
"""Fraction below which a slow one costs all others half of their time."""

_MANY = 5
_DEVIATIONS = 5.0
_NORMAL = 1.4826


def find_slow(rates: Mapping[K, float]) -> dict[K, float]:
    """Return the slow ones, with their rate as a fraction of the median of the others.

    Slow is below NOTABLE. Among many it must also be an outlier: by more than five standard deviations,
    estimated from the median absolute deviation, so that no slow one hides another by its effect on the
    spread; Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49. Among few, only the
    fraction decides, since their spread is unknown.
    """
    found: dict[K, float] = {}
    if len(rates) < 2:
        return found
    middle = statistics.median(rates.values())
    spread = _NORMAL * statistics.median(abs(rate - middle) for rate in rates.values())
    for key, rate in rates.items():
        usual = statistics.median(other for name, other in rates.items() if name != key)
        far = len(rates) < _MANY or middle - rate > _DEVIATIONS * spread
        if usual > 0 and rate < NOTABLE * usual and far:
            found[key] = rate / usual
    return found
