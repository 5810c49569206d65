"""Run the cells of docs/reference/feature-matrix.md, and compare the page with their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.feature_pairs import PAGE, PAIRS, Pair, attempt, layout, page, read, starting
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes

QUICK = {"EMA", "factory", "custom loop", "tied"}
"""The features that `make test` tries, with FSDP. `make test-long` tries all pairs."""


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str], Ranks]]:
    with starting() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def said() -> dict[Pair, str | None]:
    return read(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_every_pair_and_nothing_else(said: dict[Pair, str | None]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert said.keys() == {*PAIRS}
    assert page(text, said) == text


def _marks(pair: Pair) -> list[pytest.MarkDecorator]:
    if "FSDP" in pair and QUICK & {*pair}:
        return []
    return [pytest.mark.long]


def _parameters() -> list[Any]:
    return [pytest.param(pair, id=" x ".join(pair), marks=_marks(pair)) for pair in PAIRS]


@pytest.mark.full
@pytest.mark.parametrize("pair", _parameters())
def test_a_pair_is_what_the_page_says(
    started: Callable[[str], Ranks], said: dict[Pair, str | None], pair: Pair, tmp_path: Path
) -> None:
    if {"script", "fp16"} == {*pair}:  # TorchScript keeps to the first dtype of autocast in a process
        with starting() as ranks:
            found = attempt(ranks(layout(pair)), pair, tmp_path / "run")
    else:
        found = attempt(started(layout(pair)), pair, tmp_path / "run")
    assert found == said[pair]
