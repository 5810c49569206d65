"""Dropout, BatchNorm, stochastic depth: one process is the specification of networks that have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import shoal
from helpers.exact_layers import (
    PIPELINES,
    Case,
    cases,
    train,
    train_on,
    train_until_killed,
)
from helpers.exact_models import EXAMPLES, build
from helpers.pairwise import cover
from helpers.ranks import RankError, Ranks
from helpers.reference import SEED, TOLERANCE, Trained, distance, together

pytestmark = pytest.mark.processes

FEW = {Case("ViT", "Tensor", 2, 1)}
SPLIT = {
    Case("GPT", "DDP", 2, 3),
    Case("ViT", "Recomputed, DDP", 2, 1, 24),
    Case("Contrastive", "DDP", 2, 1, then=1),
    Case("Untied GPT", "Pipeline", 2, 3),
    Case("Even GPT", "Context", 2, 3),
    Case("Shared", "Interleaved", 2, 3, then=3),
    Case("Untied GPT", "RPC", 2, 3),
}
"""Those of `make test-rest`: most of them split activations or layers over ranks."""


def _parameters() -> list[object]:
    """All cells, but of pipelines only a cover of all pairs of values."""
    every = sorted(cases(), key=lambda case: (case.size, case.layout))
    staged = [case for case in every if case.way in PIPELINES]
    key = lambda c: (c.way, c.size, c.model, c.micro_batches, c.samples, c.then)  # noqa: E731
    left_out = set(staged) - cover(staged, key) - FEW - SPLIT
    every = [case for case in every if case not in left_out]
    return [
        pytest.param(
            case,
            id="-".join(map(str, case)),
            marks=()
            if case in FEW
            else pytest.mark.full(rows="all")
            if case in SPLIT
            else pytest.mark.long,
        )
        for case in every
    ]


@cache
def expected(case: Case) -> Trained:
    with shoal.init(device="cpu", seed=SEED) as world:
        return train(world, case)


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int, str], Ranks]]:
    """Ranks by their number, divided as a layout says."""
    with contextlib.ExitStack() as stack:
        running: dict[int, Ranks] = {}
        layouts: dict[int, str] = {}

        def ranks(size: int, layout: str) -> Ranks:
            if size not in running:
                running[size] = stack.enter_context(Ranks(size, layout=layout, seed=SEED))
            elif layouts[size] != layout:
                running[size].divide(layout)
            layouts[size] = layout
            return running[size]

        yield ranks


@pytest.mark.parametrize("case", _parameters())
def test_training_equals_one_process(
    started: Callable[[int, str], Ranks], case: Case, tmp_path: Path
) -> None:
    if case.then:
        before = started(case.size, case.layout).call(train_until_killed, case, str(tmp_path))[0]
        after = case._replace(way="DDP", size=case.then)
        found = started(after.size, after.layout).call(train_on, after, str(tmp_path), before)
    else:
        found = started(case.size, case.layout).call(train, case)
    for each in together(found):
        assert distance(each, expected(case.specification)) < TOLERANCE


@pytest.mark.long
def test_a_run_continues_in_a_pipeline(started: Callable[[int, str], Ranks], tmp_path: Path) -> None:
    begun = Case("Shared", "DDP", 3)
    before = started(3, begun.layout).call(train_until_killed, begun, str(tmp_path))[0]
    after = Case("Shared", "Interleaved", 2, micro_batches=3)
    for each in together(started(2, after.layout).call(train_on, after, str(tmp_path), before)):
        assert distance(each, expected(after.specification)) < TOLERANCE


def parallelized(world: shoal.World, model: str, split_point: str) -> None:
    shoal.parallelize(build(model), world, shoal.Pipeline(split_points=(split_point,)))


@pytest.mark.parametrize(
    ("model", "split_point", "found"),
    [
        ("GPT", "blocks.1", "words.weight and head.weight are one parameter in two stages"),
        ("Drops", "recurrent", "its forward cannot be split at"),
        ("Contrastive", "blocks.1", "is used in two stages on different ranks"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    started: Callable[[int, str], Ranks], model: str, split_point: str, found: str
) -> None:
    for result in started(2, "pipeline=2").attempt(parallelized, model, split_point):
        assert isinstance(result, RankError)
        assert found in str(result.error), result.text


def first_step(world: shoal.World, case: Case) -> None:
    train(world, case, steps=1)


@pytest.mark.parametrize("model", [name for name, each in EXAMPLES.items() if each.normalizes])
def test_a_batch_of_several_micro_batches_has_no_statistics(
    started: Callable[[int, str], Ranks], model: str
) -> None:
    case = Case(model, "DDP", 2, micro_batches=3)
    for result in started(2, case.layout).attempt(first_step, case):
        assert isinstance(result, RankError)
        assert isinstance(result.error, shoal.StepError), result.text
        assert "with micro_batches=3" in str(result.error)
        assert "statistics=" in result.error.fix
