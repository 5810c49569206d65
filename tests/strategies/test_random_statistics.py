"""The stream of random numbers: Philox's known answers, and statistics with fixed seeds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

import shoal
from helpers.keyed_draws import draw, rows_drawn
from helpers.lazy import LazyModule
from shoal.strategies.random_draws import philox

stats = LazyModule("scipy.stats")

CPU = torch.device("cpu")
ROWS, COUNT = 64, 4096
# About 60 p-values: independent uniform numbers would fail one of them with probability 0.006.
LEAST_P = 1e-4

KNOWN = [
    "00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1",
]
"""Counter, key and result of philox 4x32-10, of Random123's `kat_vectors`."""


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python's integers, as the paper writes it."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize("line", KNOWN)
def test_known_answers(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, expected = words[:4], words[4:6], words[6:]
    assert reference(counter, key) == expected
    columns = [np.array([word], np.uint64) for word in counter]
    philox._rounds_on_cpu(columns, [np.empty(1, np.uint64) for _ in range(2)], (key[0], key[1]))
    assert [int(column[0]) for column in columns] == expected


SLICES = [
    philox.Slice((5, 7, 3), (0, 0, 0), (5, 7, 3)),
    philox.Slice((2, 7, 3), (3, 0, 0), (5, 7, 3)),  # consecutive elements
    philox.Slice((1, 3, 3), (4, 2, 0), (5, 7, 3)),
    philox.Slice((5, 3, 3), (0, 4, 0), (5, 7, 3)),
    philox.Slice((5, 7, 1), (0, 0, 2), (5, 7, 3)),
    philox.Slice((2, 4, 2), (1, 3, 1), (5, 7, 3)),
]


@pytest.mark.parametrize("part", SLICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slice_has_the_numbers_of_the_full_row(part: philox.Slice, dtype: torch.dtype) -> None:
    places = tuple(slice(at, at + size) for size, at, _ in zip(*part, strict=True))
    count = math.prod(part.sizes)

    def chosen(full: torch.Tensor) -> torch.Tensor:
        return full.reshape(4, *part.full)[(slice(None), *places)].reshape(4, count)

    full = philox.uniform((7, 8), 5, 4, math.prod(part.full), CPU, dtype)
    assert torch.equal(philox.uniform((7, 8), 5, 4, count, CPU, dtype, part), chosen(full))
    below = philox.below(0.3, (7, 8), 5, 4, math.prod(part.full), CPU)
    assert torch.equal(philox.below(0.3, (7, 8), 5, 4, count, CPU, part), chosen(below))
    blocks, columns = philox._elements(count, 4, part)
    words = torch.stack(philox._on_device((7, 8), 5, 4, blocks, CPU), -1).view(4, -1)
    full = torch.stack(philox._on_device((7, 8), 5, 4, slice(0, 27), CPU), -1).view(4, -1)
    assert torch.equal(words[:, columns], chosen(full[:, : math.prod(part.full)]))


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_words_are_those_of_philox(first: int) -> None:
    key = (7, 2**32 - 3)
    expected = [
        [word for b in range(3) for word in reference([b, 0, p & 0xFFFFFFFF, p >> 32], list(key))]
        for p in range(first, first + 5)
    ]
    words = torch.stack(philox._on_device(key, first, 5, slice(0, 3), CPU), -1).view(5, 12)
    assert words.tolist() == expected
    numbers = philox.uniform(key, first, 5, 11, CPU, torch.float32)
    assert torch.equal(numbers, (words[:, :11] >> 8) * 2.0**-24)
    assert torch.equal(philox.below(0.3, key, first, 5, 11, CPU), words[:, :11] < round(0.3 * 2**32))
    pairs = words.view(5, 6, 2)
    doubles = ((pairs[..., 0] >> 5).double() * 2.0**26 + (pairs[..., 1] >> 6)) * 2.0**-53
    assert torch.equal(philox.uniform(key, first, 5, 6, CPU, torch.float64), doubles)


Numbers = npt.NDArray[np.float64]


def uniform(
    site: str = "layer#0",
    seed: int = 0,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
    count: int = COUNT,
) -> Numbers:
    found = philox.uniform(philox.site_key(seed, site), first, rows, count, CPU, dtype)
    return found.double().numpy()


DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_uniform(dtype: torch.dtype) -> None:
    found = uniform(dtype=dtype)
    assert found.min() >= 0
    assert found.max() < 1
    assert stats.kstest(found.ravel(), "uniform").pvalue > LEAST_P
    counts = np.histogram(found, 1024, (0, 1))[0]
    assert stats.chisquare(counts).pvalue > LEAST_P
    # Within each row, and the p-values of the rows again: neither too far from uniform nor too near.
    rows = [stats.kstest(row, "uniform").pvalue for row in found]
    assert stats.kstest(rows, "uniform").pvalue > LEAST_P


def test_short_rows_are_uniform_too() -> None:
    """The first elements of many rows, as of dropout of channels and stochastic depth."""
    found = uniform(rows=ROWS * COUNT, count=1)
    assert stats.kstest(found.ravel(), "uniform").pvalue > LEAST_P
    pairs = np.histogram2d(found[:-1, 0], found[1:, 0], 32, ((0, 1), (0, 1)))[0]
    assert stats.chisquare(pairs.ravel()).pvalue > LEAST_P


def test_every_bit_is_set_half_of_the_time() -> None:
    words = (
        torch.stack(philox._on_device((3, 4), 0, ROWS, slice(0, COUNT // 4), CPU), -1).numpy().ravel()
    )
    set_bits = ((words[:, None] >> np.arange(32)) & 1).sum(0)
    deviations = (set_bits - len(words) / 2) / (len(words) / 4) ** 0.5
    assert stats.kstest(deviations, "norm").pvalue > LEAST_P


STREAMS: dict[str, list[dict[str, Any]]] = {
    "sites": [{"site": f"{module}#{number}"} for module in ("a", "b") for number in range(4)],
    "models": [{"site": f"{number} a#0"} for number in range(8)],
    "seeds": [{"seed": seed} for seed in range(8)],
    "steps": [{"first": first} for first in range(0, 8 * ROWS, ROWS)],
    "steps without samples": [{"first": (1 << 62) + number, "rows": 1} for number in range(64)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("varied", STREAMS)
def test_streams_are_independent(varied: str, dtype: torch.dtype) -> None:
    """Rows of one draw, and those of different sites, models, seeds and steps."""
    found = np.concatenate([uniform(dtype=dtype, **each) for each in STREAMS[varied]])
    correlations = np.corrcoef(found)[np.triu_indices(len(found), 1)] * COUNT**0.5
    assert stats.kstest(correlations, "norm").pvalue > LEAST_P
    assert np.abs(correlations).max() < stats.norm.isf(LEAST_P / len(correlations))
    for one, other in itertools.islice(itertools.pairwise(found), 4):  # not only linearly
        pairs = np.histogram2d(one, other, 8, ((0, 1), (0, 1)))[0]
        assert stats.chisquare(pairs.ravel()).pvalue > LEAST_P


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_independent(dtype: torch.dtype) -> None:
    found = uniform(dtype=dtype) - 0.5
    for lag in (1, 2, 3, 4, 5, 8, 64, 256):
        products = found[:, lag:] * found[:, :-lag]
        deviation = products.sum() / (products.size / 144) ** 0.5
        assert abs(deviation) < stats.norm.isf(LEAST_P)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "distribution"), [("normal_", "norm"), ("exponential_", "expon")])
def test_distributions(name: str, distribution: str, dtype: torch.dtype) -> None:
    found = draw(lambda: getattr(torch.empty(ROWS, COUNT, dtype=dtype), name)()).double().numpy()
    assert stats.kstest(found.ravel(), distribution).pvalue > LEAST_P
    of = getattr(stats, distribution)
    n = found.size
    for order in (1, 2, 3, 4):
        expected, spread = of.moment(order), (of.moment(2 * order) - of.moment(order) ** 2) ** 0.5
        assert abs((found**order).mean() - expected) < stats.norm.isf(LEAST_P) * spread / n**0.5
    correlations = np.corrcoef(found)[np.triu_indices(ROWS, 1)] * COUNT**0.5
    assert stats.kstest(correlations, "norm").pvalue > LEAST_P


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_dropout_keeps_its_fraction(p: float) -> None:
    found = draw(lambda: F.dropout(torch.ones(ROWS, COUNT), p))
    kept = int(found.count_nonzero())
    assert stats.binomtest(kept, found.numel(), 1 - p).pvalue > LEAST_P
    expected = torch.full((kept,), 1 / (1 - p) if p < 1 else 0.0)
    torch.testing.assert_close(found[found != 0], expected)
    if 0.01 < p < 0.99:  # the same fraction of each sample and of each element, as of independent ones
        for dim in (0, 1):
            counts = (found != 0).sum(dim).numpy()
            variance = counts.var() / (found.shape[dim] * p * (1 - p))
            assert abs(variance - 1) < 5 * (2 / len(counts)) ** 0.5


def test_no_numbers_occur_twice_in_a_training() -> None:
    with shoal.init(device="cpu") as world:
        rows = rows_drawn(world)
    assert len(set(rows)) == len(rows)
