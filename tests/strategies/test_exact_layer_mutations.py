"""Mistakes in the keys of random numbers and in the groups of BatchNorm: each is noticed by a check.

The checks are those of `test_exact_layers.py`, one process in one and in several micro-batches, and of
`test_random_statistics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shoal
from helpers.compiling import compiler_with
from helpers.exact_layers import GROUP, Case, train
from helpers.keyed_draws import SAMPLES, rows_drawn
from helpers.ranks import Ranks
from helpers.reference import SEED, TOLERANCE, Trained, distance, together
from shoal.data.coupling import step as coupled_step
from shoal.data.coupling.groups import MicroGroups, groups_of
from shoal.data.micro import Draws
from shoal.strategies.partition.own_stages import DrawCounts
from shoal.strategies.pipeline import engine
from shoal.strategies.pipeline.stage import StagedBatch, staged
from shoal.strategies.random_draws import draws, graphs, philox
from shoal.strategies.random_draws.layouts import Layouts
from shoal.strategies.random_draws.slices import Slices

pytestmark = pytest.mark.full

STEPS = 3
"""An epoch: a batch has 12 of 29 samples."""
KEYED = Case("Drops", "DDP", 1, micro_batches=3)
RECOMPUTED = KEYED._replace(way="Recomputed, DDP")
COMPILED = Case("GPT", "DDP", 1, micro_batches=3, compile="inductor")
GROUPED = Case("ResNet", "DDP", 1, micro_batches=3, statistics=GROUP)


def split_changes_nothing(case: Case) -> bool:
    compiler = patch.object(torch, "compile", compiler_with("aot_eager"))
    with compiler, shoal.init(device="cpu", seed=SEED) as world:
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
    right = draws.first_position
    wrong = lambda micro, dim: changed(right(micro, dim))  # noqa: E731
    stack = ExitStack()
    for module in (draws, graphs):
        stack.enter_context(patch.object(module, "first_position", wrong))
    return stack


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
    "compiled key without position": (
        COMPILED,
        lambda: patch.object(graphs, "first_position", lambda micro, dim: 0),
    ),
    "no sample dimension": (KEYED, lambda: patch.object(Layouts, "fit", lambda *_: None)),
    "recomputed draws are new": (RECOMPUTED, lambda: patch.object(draws, "in_backward", bool)),
    "group boundary off by one": (GROUPED, lambda: patch.object(coupled_step, "groups_of", moved)),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=[pytest.mark.long] if MISTAKES_IN_A_SPLIT[each][0] == COMPILED else [])
        for each in MISTAKES_IN_A_SPLIT
    ],
)
def test_a_split_that_changes_numbers_is_noticed(mistake: str) -> None:
    case, planted = MISTAKES_IN_A_SPLIT[mistake]
    with planted():
        assert not split_changes_nothing(case)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [KEYED, RECOMPUTED, pytest.param(COMPILED, marks=pytest.mark.long), GROUPED], ids=str
)
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


def train_with_wrong_slices(world: shoal.World, case: Case, mistake: str) -> Trained:
    """A training in which a slice begins one element too late, or is taken for the full tensor."""
    right = Slices.part

    def wrong(slices: Slices, site: str, shape: Any) -> Any:
        part = right(slices, site, shape)
        if part is None or not any(part.first) or not mistake:
            return part
        if mistake == "ignored":
            return philox.complete(part.sizes)
        return part._replace(first=(*part.first[:-1], part.first[-1] + 1))

    with patch.object(Slices, "part", wrong):
        return train(world, case, STEPS)


def of_the_first_micro_batch(batch: shoal.Batch, *, keyed: bool) -> StagedBatch:
    found = staged(batch, keyed=keyed)
    first = found.draws[0]
    return found._replace(draws=[first and Draws(first.micro, batch.seed) for _ in found.draws])


def without_counts(counts: DrawCounts, received: Any) -> Any:
    return received[:-1] if counts._names else received


MISTAKES_IN_STAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "key of another micro-batch": lambda: patch.object(engine, "staged", of_the_first_micro_batch),
    "site without the prefix of the stage": lambda: with_key(
        lambda seed, site: (seed, re.sub(r"blocks\.\d+\.", "", site))
    ),
    "counts of the stage before are lost": lambda: patch.object(
        DrawCounts, "taken_from", without_counts
    ),
}


def train_with_a_mistake(world: shoal.World, case: Case, mistake: str) -> Trained:
    with MISTAKES_IN_STAGES[mistake]():
        return train(world, case, STEPS)


@pytest.mark.long
@pytest.mark.processes
def test_mistakes_in_stages_are_noticed() -> None:
    case = Case("Shared", "Pipeline", 2, micro_batches=3)
    with shoal.init(device="cpu", seed=SEED) as world:
        expected = train(world, case.specification, STEPS)
    with Ranks(2, layout=case.layout, seed=SEED) as ranks:
        for mistake in MISTAKES_IN_STAGES:
            results = ranks.attempt(train_with_a_mistake, case, mistake)
            found = [each for each in results if isinstance(each, Trained)]
            errors = [distance(each, expected) for each in together(found)]
            equal = len(found) == 2 and max(errors) < TOLERANCE
            assert equal == (mistake == "none"), mistake


@pytest.mark.processes
@pytest.mark.parametrize("way", ["Tensor", "Sequence", "Context"])
def test_a_slice_that_is_wrong_is_noticed(way: str) -> None:
    case = Case("Even GPT" if way == "Context" else "GPT", way, 2)
    with shoal.init(device="cpu", seed=SEED) as world:
        expected = train(world, case.specification, STEPS)
    with Ranks(2, layout=case.layout, seed=SEED) as ranks:
        for mistake in ("", "off by one", "ignored"):
            for found in ranks.call(train_with_wrong_slices, case, mistake):
                assert (distance(found, expected) < TOLERANCE) == (not mistake)
