"""One process is the specification: the same training at any split of the same global batches.

The specification is plain torch; Shoal in one process is held to it like any other world. Every row
runs on ranks that are started once per world size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.pairwise import cover
from helpers.ranks import Ranks
from helpers.reference import ROWS, SEED, TOLERANCE, Row, Trained, distance, specification, train

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by world size, started when first asked for."""
    with contextlib.ExitStack() as stack:
        worlds: dict[int, Ranks] = {}

        def ranks(size: int) -> Ranks:
            if size not in worlds:
                worlds[size] = stack.enter_context(Ranks(size, seed=SEED))
            return worlds[size]

        yield ranks


_EXPECTED: dict[Row, Trained] = {}


def expected(row: Row) -> Trained:
    """The specification does not depend on the split, so rows that differ only in it share one."""
    key = Row(row.model, row.samples, row.tokens, 1, False, row.clip)
    if key not in _EXPECTED:
        _EXPECTED[key] = specification(key)
    return _EXPECTED[key]


def _identify(row: Row) -> str:
    words = [row.model[:4], str(row.samples), "tokens" if row.tokens else "samples"]
    words += [f"{row.micro_batches}micro", "raw" if row.raw else "step", f"clip{row.clip}"]
    return "-".join(words)


def _cases() -> list[Any]:
    """Every row in every world; without `make test-all` a cover of each pair of properties."""
    table = list(itertools.product((1, 2, 3, 4), ROWS))
    covered = cover(table, lambda case: (case[0], *dataclasses.astuple(case[1])))
    return [
        pytest.param(
            size,
            row,
            id=f"{size}ranks-{_identify(row)}",
            marks=[] if (size, row) in covered else [pytest.mark.long],
        )
        for size, row in table
    ]


@pytest.mark.parametrize(("size", "row"), _cases())
def test_any_split_trains_like_one_process(
    started: Callable[[int], Ranks], size: int, row: Row
) -> None:
    for result in started(size).call(train, row):
        assert distance(result, expected(row)) < TOLERANCE


RAGGED_TOKENS = Row("transformer", 101, True, 2, False, 0.5)
THREE_SAMPLES = Row("convolutional", 3, False, 1, False, None)
EVEN = Row("convolutional", 96, False, 1, True, None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutation", "row"),
    [
        ("no count correction", RAGGED_TOKENS),
        ("stand-in counts", THREE_SAMPLES),
        ("one rank silent", EVEN),
    ],
)
def test_the_comparison_notices_mutations(mutation: str, row: Row) -> None:
    with Ranks(4, seed=SEED) as ranks:
        assert distance(ranks.call(train, row)[0], expected(row)) < TOLERANCE
        assert distance(ranks.call(train, row, mutation)[0], expected(row)) > 1e-4
