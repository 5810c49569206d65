"""Checks of numbers that users pass."""

from __future__ import annotations

import math
import operator
from typing import TypeGuard


def is_integer(value: object, *, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is an integer of at least `least`; not for booleans."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    return operator.index(value) >= least


def integer_like(value: object, default: int) -> int:
    """Return the integer that a whole float such as 3.0 means, to show in a fix; else `default`."""
    return int(value) if isinstance(value, float) and value.is_integer() and value > 0 else default


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite integer or float; booleans are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
