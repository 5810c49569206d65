"""Mistakes in the keys of random numbers and in the groups of BatchNorm: each is noticed by a check.

The checks are those of `test_exact_layers.py`, one process in one and in several micro-batches, and of
`test_random_statistics.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

import shoal
from helpers.exact_layers import GROUP, Case, train
from helpers.keyed_draws import SAMPLES, rows_drawn
from helpers.reference import SEED, TOLERANCE, distance
from shoal.data import coupled
from shoal.data.groups import MicroGroups, groups_of
from shoal.strategies.random_draws import draws, philox
from shoal.strategies.random_draws.layouts import Layouts

STEPS = 3
"""An epoch: a batch has 12 of 29 samples."""
KEYED = Case("Drops", "DDP", 1, micro_batches=3)
RECOMPUTED = KEYED._replace(way="Recomputed, DDP")
GROUPED = Case("ResNet", "DDP", 1, micro_batches=3, statistics=GROUP)


def split_changes_nothing(case: Case) -> bool:
    with shoal.init(device="cpu", seed=SEED) as world:
        found, expected = (train(world, each, STEPS) for each in (case, case.specification))
    return distance(found, expected) < TOLERANCE


def numbers_occur_once() -> bool:
    with shoal.init(device="cpu") as world:
        rows = rows_drawn(world)
    return len(set(rows)) == len(rows)


def with_key(changed: Callable[[int, str], tuple[int, str]]) -> AbstractContextManager[Any]:
    """Keys of other seeds and sites."""
    right = philox.site_key
    return patch.object(philox, "site_key", lambda seed, site: right(*changed(seed, site)))


def with_position(changed: Callable[[int], int]) -> AbstractContextManager[Any]:
    """Numbers of other positions."""
    right = draws._Site
    return patch.object(draws, "_Site", lambda key, first, *rest: right(key, changed(first), *rest))


def moved(*arguments: Any, **named: Any) -> MicroGroups:
    """The boundary between the first two groups of a micro-batch moved by one sample."""
    groups: MicroGroups = groups_of(*arguments, **named)
    held = []
    for parts in groups.held:
        if len(parts) > 1:
            first, second, *others = parts
            first = first._replace(stop=first.stop + 1)
            parts = (first, second._replace(start=second.start + 1), *others)
        held.append(tuple(parts))
    return groups._replace(held=tuple(held))


MISTAKES_IN_A_SPLIT: dict[str, tuple[Case, Callable[[], AbstractContextManager[Any]]]] = {
    "key without position": (KEYED, lambda: with_position(lambda first: 0)),
    "no sample dimension": (KEYED, lambda: patch.object(Layouts, "dimension", lambda *_: None)),
    "recomputed draws are new": (RECOMPUTED, lambda: patch.object(draws, "in_backward", bool)),
    "group boundary off by one": (GROUPED, lambda: patch.object(coupled, "groups_of", moved)),
}


@pytest.mark.parametrize("mistake", MISTAKES_IN_A_SPLIT)
def test_a_split_that_changes_numbers_is_noticed(mistake: str) -> None:
    case, planted = MISTAKES_IN_A_SPLIT[mistake]
    with planted():
        assert not split_changes_nothing(case)


@pytest.mark.parametrize("case", [KEYED, RECOMPUTED, GROUPED], ids=str)
def test_without_a_mistake_it_changes_nothing(case: Case) -> None:
    assert split_changes_nothing(case)


STEP = 1 << 62
MISTAKES_IN_KEYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "key without seed": lambda: with_key(lambda seed, site: (0, site)),
    "site without module": lambda: with_key(lambda seed, site: (seed, site.partition("#")[2])),
    "site without call number": lambda: with_key(lambda seed, site: (seed, site.partition("#")[0])),
    "position in the epoch": lambda: with_position(lambda first: first % (2 * SAMPLES)),
    "position in the batch": lambda: with_position(lambda first: first % SAMPLES),
    "key without step": lambda: with_position(lambda first: min(first, STEP)),
}


@pytest.mark.parametrize("mistake", MISTAKES_IN_KEYS)
def test_numbers_that_occur_twice_are_noticed(mistake: str) -> None:
    with MISTAKES_IN_KEYS[mistake]():
        assert not numbers_occur_once()


def test_without_a_mistake_numbers_occur_once() -> None:
    assert numbers_occur_once()
