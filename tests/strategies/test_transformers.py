"""Tiny models of transformers with their own collators: the same losses at any split, or a line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from helpers.ranks import Ranks
from helpers.text_models import TEXT_CASES, Sentences, TextCase, next_word_loss, text_loss

pytestmark = pytest.mark.long


def train(
    world: shoal.World, case: TextCase, micro_batches: int = 1, strategy: Any = None
) -> tuple[list[float], str]:
    """Losses of an epoch, and what was printed."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = shoal.parallelize(case.model().double(), world, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = next_word_loss if case.kind == "next" else text_loss
        step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: {**batch}))
        loader = shoal.Loader(
            Sentences(case.kind),
            world,
            batch_size=6,
            micro_batches=micro_batches,
            collate_fn=case.collate(),
        )
        losses = [float(step(batch).loss) for batch in loader.epochs(1)]
    return losses, printed.getvalue()


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Ranks]]:
    with Ranks(2, layout="replicate=-1", seed=3) as ddp, Ranks(2, layout="shard=-1", seed=3) as fsdp:
        yield {"ddp": ddp, "fsdp": fsdp}


@pytest.mark.processes
@pytest.mark.parametrize("case", TEXT_CASES, ids=lambda case: case.name)
def test_no_difference_is_silent(started: dict[str, Ranks], case: TextCase) -> None:
    with shoal.init(seed=3) as world:
        alone, _ = train(world, case)
        others = [train(world, case, 3)]
    others.append(started["ddp"].call(train, case, 1, shoal.DDP(find_unused_parameters=True))[0])
    others.append(started["fsdp"].call(train, case, 2, shoal.FSDP())[0])
    for losses, printed in others:
        said = "random numbers were drawn" in printed
        assert said or losses == pytest.approx(alone, rel=1e-9), printed
        assert said == (case.name == "Funnel"), printed
