"""Arithmetic of the planner's formulas, on the numbers of one plan or on arrays of several."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Quantity: TypeAlias = Any
"""A number of one plan, or an array with the numbers of several plans."""


def choose(condition: Quantity, yes: Quantity, no: Quantity) -> Quantity:
    """Return `yes` where a condition holds, and `no` elsewhere."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def larger(one: Quantity, other: Quantity) -> Quantity:
    """Return the larger number, or the larger of each pair."""
    return choose(one >= other, one, other)


def smaller(one: Quantity, other: Quantity) -> Quantity:
    """Return the smaller number, or the smaller of each pair."""
    return choose(one <= other, one, other)


def log2(value: Quantity) -> Quantity:
    """Return the binary logarithm of a number, or of each."""
    return np.log2(value) if isinstance(value, np.ndarray) else math.log2(value)
