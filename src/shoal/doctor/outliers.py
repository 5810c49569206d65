"""Which of many that should be alike is slow."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

NOTABLE = 0.75
"""A share of what the others reach below which something may be slow."""

HALF = 0.5
"""Below it the slow one costs all others half of their time."""

_MANY = 5
_DEVIATIONS = 5.0
_NORMAL = 1.4826


def find_slow(rates: Mapping[K, float]) -> dict[K, float]:
    """Those that are slow, and their share of the median of the others.

    Slow is below NOTABLE. Of many it must lie far out as well: by more than five standard deviations,
    estimated from the median absolute deviation, so that no slow one hides another by the spread that
    it makes; Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49. Of few the share alone
    decides, for their spread is unknown.
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
