"""The stream of random numbers: Philox's known answers, and statistics with fixed seeds."""

from __future__ import annotations

import itertools
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
from shoal.strategies.random_draws.row_index import row_index

stats = LazyModule("scipy.stats")

CPU = torch.device("cpu")
ROWS, COUNT = 64, 4096
# About 60 p-values: independent uniform numbers would fail one of them with probability 0.006.
LEAST_P = 1e-4

KNOWN = [
    "00000000 00000000 00000000 00000000  00000000 00000000  5f6fb709 0d893f64 4f121f81 4f730a48",
    "ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  5207ddc2 45165e59 4d8ee751 8c52f662",
    "243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  4dfccaba 190a87f0 c47362ba b6b5242a",
]
"""Counter, key and result of philox 4x32-7, of Random123's `kat_vectors`."""


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-7 in Python's integers, as the paper writes it."""
    for _ in range(7):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def reference_word(key: list[int], position: int, index: tuple[int, ...], each: int) -> list[int]:
    """The words of the block of `each` elements of a sample that has an element."""
    widths = (24, 20, 20, 12, 8)
    values = [index[-1] // each, *reversed(index[:-1])]
    counter = shift = 0
    for value, width in zip(values[:3], widths[:3], strict=False):
        counter, shift = counter | value << shift, shift + width
    counter, shift = counter | position << 64, 64 + 44
    for value, width in zip(values[3:], widths[3:], strict=False):
        counter, shift = counter | value << shift, shift + width
    return reference([counter >> 32 * word & 0xFFFFFFFF for word in range(4)], key)


@pytest.mark.parametrize("line", KNOWN)
def test_known_answers(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, expected = words[:4], words[4:6], words[6:]
    assert reference(counter, key) == expected
    low, high = (np.array([counter[at] | counter[at + 1] << 32], np.uint64) for at in (0, 2))
    [(_, found)] = philox._words_on_cpu((key[0], key[1]), low, high)
    assert [int(word[0]) for word in found] == expected
    signed = [torch.from_numpy(each.view(np.int64)) for each in (low, high)]
    assert [int(word) for word in philox.words_of((key[0], key[1]), *signed)] == expected


KEY = [7, 2**32 - 3]
INDEX = [(0,), (3, 5), (2, 1, 40), (3, 0, 2, 17), (1, 2, 1, 0, 33)]


@pytest.mark.parametrize("position", [0, 2**32 - 2, 2**43 + 1])
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_numbers_are_those_of_the_counter(index: tuple[int, ...], position: int) -> None:
    part = philox.Slice((2,) * len(index), index)
    rows, key = philox.Rows(position, 3), (KEY[0], KEY[1])
    singles = philox.uniform(key, rows, part, CPU, torch.float32)
    doubles = philox.uniform(key, rows, part, CPU, torch.float64)
    second = philox.uniform(key, rows, part, CPU, torch.float32, 2)
    limits = [philox.below(limit, key, rows, part, CPU) for limit in (0.0, 0.3, 0.5, 1.0)]
    for row, *offset in itertools.product(range(3), *[range(2)] * len(index)):
        at = tuple(one + other for one, other in zip(index, offset, strict=True))
        element = (row, *offset)

        def words(each: int, key: list[int], row: int = row, at: tuple[int, ...] = at) -> list[int]:
            return reference_word(key, position + row, at, each)

        assert singles[element] == (words(4, KEY)[at[-1] % 4] >> 8) * 2.0**-24
        assert second[element] == (words(4, [KEY[0], 2**32 - 1])[at[-1] % 4] >> 8) * 2.0**-24
        high, low = words(2, KEY)[2 * (at[-1] % 2) :][:2]
        assert doubles[element] == ((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53
        first = words(16, KEY)[at[-1] % 16 // 4] >> 8 * (at[-1] % 4) & 0xFF
        number = first << 24 | words(4, [KEY[0], KEY[1] + 1])[at[-1] % 4] >> 8
        for limit, below in zip((0.0, 0.3, 0.5, 1.0), limits, strict=True):
            assert below[element] == (number < round(limit * 2**32))


def test_bits_that_decide_rarely_are_those_of_the_counter() -> None:
    """The last 24 bits of a number matter to one of 256 elements."""
    rows, part = philox.Rows(0, 4), philox.complete((3, 501))
    numbers = torch.stack(
        [
            philox.below(limit / 2**32, (7, 8), rows, part, CPU)
            for limit in range(77 << 24, 78 << 24, 2**16)
        ]
    )
    assert torch.equal(numbers, numbers.cummax(0).values)  # a larger limit loses none
    gained = (numbers[-1] & ~numbers[0]).sum()
    assert stats.binomtest(int(gained), numbers[0].numel(), 255 / 256 / 256).pvalue > LEAST_P


SLICES = [
    ((5, 7, 3), (0, 0, 0)),
    ((2, 7, 3), (3, 0, 0)),
    ((1, 3, 21), (4, 2, 0)),
    ((5, 7, 18), (0, 0, 3)),
]


@pytest.mark.parametrize("part", [philox.Slice(*each) for each in SLICES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slice_has_the_numbers_of_the_full_row(part: philox.Slice, dtype: torch.dtype) -> None:
    places = (slice(None), *(slice(at, at + size) for size, at in zip(*part, strict=True)))
    rows, full = philox.Rows(5, 4), philox.complete((5, 7, 21))
    numbers = philox.uniform((7, 8), rows, full, CPU, dtype)
    assert torch.equal(philox.uniform((7, 8), rows, part, CPU, dtype), numbers[places])
    below = philox.below(0.3, (7, 8), rows, full, CPU)
    assert torch.equal(philox.below(0.3, (7, 8), rows, part, CPU), below[places])


def test_an_index_has_the_numbers_of_its_samples() -> None:
    index = row_index(torch.tensor([2, 0, 2, 2, 0]))
    full = philox.uniform((7, 8), philox.Rows(5, 3), philox.complete((3, 6)), CPU, torch.float32)
    found = philox.uniform((7, 8), philox.Rows(5, 5, index), philox.complete((6,)), CPU, torch.float32)
    assert torch.equal(found, full[[2, 0, 2, 2, 0], [0, 0, 1, 2, 1]])


@pytest.mark.parametrize("index", [None, row_index(torch.tensor([1, 0, 1, 1]))])
@pytest.mark.parametrize("sizes", [(), (5,), (2, 3, 37)])
def test_other_devices_have_the_numbers_of_the_cpu(
    sizes: tuple[int, ...], index: philox.RowIndex | None
) -> None:
    part, key = philox.Slice(sizes, (3,) * len(sizes)), (7, 8)
    for first in (5, 2**40):
        rows = philox.Rows(first, 4, index)
        on_device = rows._replace(first=torch.tensor(first))  # as in the table of a compiled graph
        for limit in (0.0, 0.3, 0.5, 1.0):
            cpu = philox.below(limit, key, rows, part, CPU)
            assert torch.equal(philox.below(limit, key, on_device, part, CPU), cpu)
        for dtype in DTYPES:
            cpu = philox.uniform(key, rows, part, CPU, dtype, 1)
            assert torch.equal(philox.uniform(key, on_device, part, CPU, dtype, 1), cpu)


DTYPES = [torch.float32, torch.float64]
Numbers = npt.NDArray[np.float64]


def uniform(
    site: str = "layer#0",
    seed: int = 0,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
    count: int = COUNT,
) -> Numbers:
    key, part = philox.site_key(seed, site), philox.complete((count,))
    return philox.uniform(key, philox.Rows(first, rows), part, CPU, dtype).double().numpy()


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
    low = np.arange(ROWS * COUNT // 4, dtype=np.uint64)
    words = np.concatenate([np.stack(found) for _, found in philox._words_on_cpu((3, 4), low, low)], 1)
    set_bits = ((words.reshape(-1, 1) >> np.arange(32, dtype=np.uint64)) & np.uint64(1)).sum(0)
    deviations = (set_bits - words.size / 2) / (words.size / 4) ** 0.5
    assert stats.kstest(deviations, "norm").pvalue > LEAST_P


STREAMS: dict[str, list[dict[str, Any]]] = {
    "sites": [{"site": f"{module}#{number}"} for module in ("a", "b") for number in range(4)],
    "models": [{"site": f"{number} a#0"} for number in range(8)],
    "seeds": [{"seed": seed} for seed in range(8)],
    "steps": [{"first": first} for first in range(0, 8 * ROWS, ROWS)],
    "steps without samples": [{"first": (1 << 43) + number, "rows": 1} for number in range(64)],
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
