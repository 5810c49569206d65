"""Is `Order` as random as a shuffle? Fixed seeds, so that the answers never change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from math import factorial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.lazy import LazyModule
from shoal.data.permutation import Permutation

stats = LazyModule("scipy.stats")

pytestmark = pytest.mark.full(rows="all")  # the first of each statistic; the others are long

Table = npt.NDArray[np.int64]

SIZES = (5, 6, 7, 8, 9, 10, 17, 100, 1000, 10**4, 10**6)
ENTIRE = {10**4: 200, 10**6: 8}  # how many whole orders to look at; elsewhere 2,000
SEEDS = range(2_000)
LEAST_P = 1e-4


@cache
def orders(size: int, seeds: range) -> Table:
    """Whole orders, one per row."""
    return np.stack([Permutation(size, seed=seed).indices(0, size) for seed in seeds])


def at(size: int, position: int, count: int, seeds: range) -> Table:
    """`count` indices from `position` on in the order of each seed."""
    if size <= 1000:
        return orders(size, seeds)[:, position : position + count]
    return np.stack([Permutation(size, seed=s).indices(position, position + count) for s in seeds])


def p_first(size: int, seeds: range) -> float:
    """Chi-square: the first index is uniform."""
    bins = min(size, 20)
    observed = np.bincount(at(size, 0, 1, seeds)[:, 0] * bins // size, minlength=bins)
    widths = np.bincount(np.arange(size) * bins // size)
    return float(stats.chisquare(observed, widths / size * len(seeds)).pvalue)


def p_neighbours(size: int, seeds: range) -> float:
    """Chi-square: ordered pairs of neighbours in mid-order are uniform over distinct pairs."""
    bins = min(size, 10)
    first, second = (at(size, size // 2, 2, seeds) * bins // size).T
    observed = np.bincount(first * bins + second, minlength=bins**2)
    widths = np.bincount(np.arange(size) * bins // size)
    pairs = (np.outer(widths, widths) - np.diag(widths)).ravel()  # no index follows itself
    possible = pairs > 0
    assert observed[~possible].sum() == 0
    expected = pairs[possible] / (size * (size - 1)) * len(seeds)
    return float(stats.chisquare(observed[possible], expected).pvalue)


def p_pairs_within(size: int, seeds: range) -> float:
    """Chi-square: the disjoint neighbouring pairs inside each order fill a grid evenly.

    Only for large sizes, where drawing without replacement is as good as with.
    """
    bins = 16
    total = 0.0
    for row in orders(size, seeds):
        first, second = (row * bins // size).reshape(-1, 2).T
        observed = np.bincount(first * bins + second, minlength=bins**2).reshape(bins, bins)
        expected = np.full((bins, bins), observed.sum() / bins**2)
        total += float(((observed - expected) ** 2 / expected).sum())
    # Every index occurs once: the sums of the two margins are fixed, which takes bins - 1 away.
    return float(stats.chi2.sf(total, len(seeds) * (bins**2 - bins)))


def spread(size: int, distances: Table) -> npt.NDArray[np.float64]:
    """Sums of |distance| per row, standardised by their moments under a uniform shuffle.

    Diaconis and Graham 1977, "Spearman's footrule as a measure of disarray".
    """
    mean = (size**2 - 1) / 3
    variance = (size + 1) * (2 * size**2 + 7) / 45
    sums = np.abs(distances).sum(axis=1, dtype=np.int64)
    return np.asarray((sums - mean) / variance**0.5, dtype=np.float64)


def p_displacement(size: int, seeds: range) -> float:
    """Kolmogorov-Smirnov: how far samples move, against NumPy's shuffles (small) or the normal."""
    ours = spread(size, orders(size, seeds) - np.arange(size))
    if size >= 100:
        return float(stats.kstest(ours, "norm").pvalue)
    shuffle = np.random.default_rng(seeds.start)
    theirs = np.stack([shuffle.permutation(size) for _ in range(5 * len(seeds))])
    return float(stats.ks_2samp(ours, spread(size, theirs - np.arange(size))).pvalue)


def p_all_orders(size: int, seeds: range) -> float:
    """Chi-square: each of the size! orders is equally frequent."""
    rank = {order: number for number, order in enumerate(itertools.permutations(range(size)))}
    found = [rank[tuple(row)] for row in orders(size, seeds).tolist()]
    return float(stats.chisquare(np.bincount(found, minlength=factorial(size))).pvalue)


def is_odd(permutation: Sequence[int]) -> bool:
    """Parity by cycles: a permutation is odd when size minus cycles is."""
    seen: set[int] = set()
    cycles = 0
    for start in range(len(permutation)):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = permutation[start]
    return (len(permutation) - cycles) % 2 == 1


def p_parity(size: int, seeds: range) -> float:
    """Binomial: half of the orders are odd permutations."""
    odd = sum(is_odd(row) for row in orders(size, seeds).tolist())
    return float(stats.binomtest(odd, len(seeds)).pvalue)


def planes_kept(size: int, rows: Table) -> Table:
    """How many of the planes {a, b, c, a ^ b ^ c} of a power of two each row maps to planes."""
    fours = [
        (a, b, c, a ^ b ^ c)
        for a, b, c in itertools.combinations(range(size), 3)
        if c < a ^ b ^ c < size
    ]
    kept: Table = (np.bitwise_xor.reduce(rows[:, fours], axis=2) == 0).sum(axis=1)
    return kept


def p_planes(size: int, seeds: range) -> float:
    """Chi-square: planes are kept as rarely as by NumPy's shuffles.

    Networks built on xor keep planes; of all statistics of four positions, this one forgets the
    start most slowly. A network of 12 rounds on 8 samples keeps 3.4 of 14, a shuffle 2.8.
    """
    shuffle = np.random.default_rng(seeds.start)
    theirs = np.stack([shuffle.permutation(size) for _ in range(5 * len(seeds))])
    counts = [planes_kept(size, orders(size, seeds)), planes_kept(size, theirs)]
    edges = np.unique(np.quantile(counts[1], np.linspace(0, 1, 12)[1:-1]))
    observed = [
        np.bincount(np.searchsorted(edges, count), minlength=len(edges) + 1) for count in counts
    ]
    both = np.array(observed)
    return float(stats.chi2_contingency(both[:, both.sum(axis=0) > 0]).pvalue)


def p_unrelated(
    one: Callable[[int], Permutation], other: Callable[[int], Permutation], seeds: range
) -> float:
    """Two families of orders agree at as few positions, and lie as far apart, as shuffles do."""
    size = len(one(0))
    distances = np.stack([one(s).indices(0, size) - other(s).indices(0, size) for s in seeds])
    equal = np.count_nonzero(distances == 0, axis=1)  # of shuffles: Poisson(1)
    observed = np.bincount(np.minimum(equal, 4), minlength=5)
    chances = stats.poisson.pmf(np.arange(4), 1)
    expected = np.append(chances, 1 - chances.sum()) * len(seeds)
    agreement = stats.chisquare(observed, expected).pvalue
    return float(min(agreement, stats.kstest(spread(size, distances), "norm").pvalue))


# About 60 p-values: a uniform shuffle would fail one of them with probability 0.006.
CASES: list[tuple[Callable[[int, range], float], int, range]] = [
    *((p, size, SEEDS) for p in (p_first, p_neighbours) for size in SIZES),
    *((p_displacement, size, range(ENTIRE.get(size, 2000))) for size in SIZES),
    *((p_pairs_within, size, range(count)) for size, count in ENTIRE.items()),
    *(
        (p_all_orders, size, range(count))
        for size, count in ((3, 600), (4, 1000), (5, 2400), (6, 3600))
    ),
    *((p_parity, size, SEEDS) for size in (7, 8, 16, 17, 32, 64)),
    *((p_planes, size, SEEDS) for size in (8, 16)),
]


@pytest.mark.parametrize(
    ("chance", "size", "seeds"),
    [
        pytest.param(
            *case, marks=pytest.mark.long if case[0] in [each[0] for each in CASES[:at]] else ()
        )
        for at, case in enumerate(CASES)
    ],
)
def test_orders_are_as_random_as_shuffles(
    chance: Callable[[int, range], float], size: int, seeds: range
) -> None:
    assert chance(size, seeds) > LEAST_P


def of(size: int = 1000, seed: int = 0, **options: Any) -> Permutation:
    return Permutation(size, seed=seed, **options)


FAMILIES: dict[str, tuple[Callable[[int], Permutation], Callable[[int], Permutation]]] = {
    "seeds": (lambda s: of(seed=s), lambda s: of(seed=s + 1)),
    "epochs": (lambda s: of(epoch=s), lambda s: of(epoch=s + 1)),
    "exchanged": (lambda s: of(seed=s, epoch=s + 1), lambda s: of(seed=s + 1, epoch=s)),
    "wide seeds": (lambda s: of(seed=s), lambda s: of(seed=s - 2**64)),
    "identity": (lambda s: of(1024, s), lambda s: of(1024, s, shuffle=False)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_orders_are_unrelated(family: str) -> None:
    assert p_unrelated(*FAMILIES[family], range(1000)) > LEAST_P


def test_sizes_are_unrelated() -> None:
    # Both walk the same domain: with the size left out of the key they would mostly agree.
    pairs = [(Permutation(1000, seed=s), Permutation(1001, seed=s)) for s in range(500)]
    equal = sum(int((a.indices(0, 1000) == b.indices(0, 1000)).sum()) for a, b in pairs)
    assert stats.poisson.cdf(equal, 500) > LEAST_P
    assert stats.poisson.sf(equal, 500) > LEAST_P


@pytest.mark.parametrize("size", [10**12, 2**61 + 1, 2**62])
def test_huge_orders_are_uniform(size: int) -> None:
    found = Permutation(size, seed=1).indices(size // 3, size // 3 + 100_000)
    assert stats.kstest(found / size, "uniform").pvalue > LEAST_P
    steps = np.diff(found) % size  # of independent values: uniform again
    assert stats.kstest(steps / size, "uniform").pvalue > LEAST_P
