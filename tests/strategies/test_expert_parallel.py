"""Expert parallelism: experts that are divided over ranks, equal to one process or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.mixtures import PLAN, MixedGPT, Mixture, Trained, trained
from helpers.ranks import RankError, Ranks
from shoal.strategies import mesh_reducer
from shoal.strategies.expert_parallel import exchange

pytestmark = pytest.mark.processes

EXPERTS = shoal.ExpertParallel()


@pytest.fixture(scope="module")
def expected() -> Trained:
    with shoal.init() as world:
        return trained(world)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="expert=2") as started:
        yield started


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (EXPERTS, {}),
        ([EXPERTS, shoal.FSDP()], {"micro_batches": 1}),
        ([shoal.ActivationCheckpointing(), EXPERTS], {}),
        pytest.param(
            [EXPERTS, shoal.FSDP(accumulate="whole", reshard_after_forward=False)],
            {"micro_batches": 3},
            marks=pytest.mark.full,
        ),
        pytest.param(EXPERTS, {"compiled": "blocks"}, marks=pytest.mark.full),
        pytest.param(
            [shoal.ActivationCheckpointing(), EXPERTS, shoal.FSDP()], {}, marks=pytest.mark.full
        ),
    ],
    ids=["replicated", "FSDP", "recomputed", "whole sums", "compiled", "recomputed FSDP"],
)
def test_a_mixture_trains_like_one_process(
    two: Ranks, expected: Trained, strategy: Any, options: dict[str, Any]
) -> None:
    for found in two.call(partial(trained, strategy=strategy, **options)):
        assert found.distance(expected) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("expert=4", EXPERTS),
        ("replicate=2,expert=2", EXPERTS),
        ("shard=2,expert=2", EXPERTS),
        ("expert=2,tensor=2", [shoal.TensorParallel(plan=PLAN), EXPERTS]),
        ("expert=2,context=2", [shoal.ContextParallel(), EXPERTS]),
        ("pipeline=2,expert=2", [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))]),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("shard=2,expert=4", EXPERTS),
                ("replicate=2,shard=2,expert=2", EXPERTS),
                ("shard=2,expert=2,tensor=2", [shoal.TensorParallel(plan=PLAN), EXPERTS, shoal.FSDP()]),
                (
                    "pipeline=2,shard=2,expert=2",
                    [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))],
                ),
            )
        ),
    ],
)
def test_other_axes_divide_the_rest(expected: Trained, layout: str, strategy: Any) -> None:
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(trained, strategy):
            assert found.distance(expected) < 1e-9
