"""The bands around predicted steps and how many measurements they hold, for plan_accuracy.py."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

COVERED, FOLDS = 0.8, 5


@dataclass(frozen=True)
class Case:
    """The log of measured over predicted time. Cases of one group are never judged by each other."""

    table: str
    kind: str
    group: Hashable
    error: float


def band_of(cases: Sequence[Case]) -> tuple[float, float]:
    """Return the quantiles of the errors between which COVERED of them are.

    Each group counts once. With few groups, the quantiles are farther out, as in conformal prediction.
    """
    rows = Counter(each.group for each in cases)
    weighted = sorted((each.error, 1 / rows[each.group]) for each in cases)
    covered = min(1.0, COVERED * (1 + 1 / len(rows)))
    edges = []
    for below in ((1 - covered) / 2, (1 + covered) / 2):
        seen = 0.0
        for error, weight in weighted:
            seen += weight
            if seen >= below * len(rows) - 1e-9:
                edges.append(error)
                break
    return edges[0], edges[1]


def held_out_coverage(cases: Sequence[Case]) -> float:
    """Return the part of the groups inside bands that were chosen on other groups."""
    rows = Counter(each.group for each in cases)
    groups = sorted(rows, key=str)
    random.Random(0).shuffle(groups)
    inside = 0.0
    for fold in range(FOLDS):
        out = set(groups[fold::FOLDS])
        low, high = band_of([each for each in cases if each.group not in out])
        held = (each for each in cases if each.group in out and low <= each.error <= high)
        inside += sum(1 / rows[each.group] for each in held)
    return inside / len(rows)


def print_bands(title: str, cases: Sequence[Case]) -> dict[str, tuple[float, float, float, int]]:
    """Print the band of each kind, as factors of the prediction; return band, coverage and rows."""
    print(f"\n80 % bands of measured / predicted time, {title}")
    print(f"{'kind':16}{'rows':>6}{'groups':>8}{'low':>8}{'high':>8}{'width':>8}{'held-out':>10}")
    result = {}
    for kind in sorted({each.kind for each in cases}):
        own = [each for each in cases if each.kind == kind]
        low, high = (math.exp(edge) for edge in band_of(own))
        covered = held_out_coverage(own)
        groups = len({each.group for each in own})
        result[kind] = (low, high, covered, len(own))
        print(f"{kind:16}{len(own):6}{groups:8}{low:8.2f}{high:8.2f}{high - low:8.2f}{covered:10.0%}")
    return result
