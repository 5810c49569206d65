"""The expected maximum over ranks, for which all of them wait."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist


@lru_cache
def slowest(count: int) -> float:
    """Return the expected maximum of `count` values of the standard normal distribution.

    The approximation of Blom 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def busiest_load(tokens: int, choices: int, experts: int, ranks: int) -> float:
    """Return the rows of the rank that gets most, relative to the mean, if routers choose at random.

    Each token of all ranks chooses some of the experts, of which each rank has an equal part. The rows
    of a rank have the mean `tokens * choices` and the variance of a hypergeometric distribution for
    each token. They are normal for many tokens, and their sum is fixed, so that the largest exceeds the
    mean by √(tokens · choices · (experts - choices) / (experts - 1)) standard normal maxima
    (`slowest`). For one choice, these are balls in bins (Raab and Steger 1998).

    Args:
        tokens: Tokens of one rank that are routed together.
        choices: Experts of each token.
        experts: Number of experts.
        ranks: Degree of the expert axis.
    """
    spread = (experts - choices) / max(1, experts - 1) / max(1, tokens * choices)
    return 1 + slowest(ranks) * math.sqrt(max(0.0, spread))
