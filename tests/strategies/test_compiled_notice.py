"""Compiled code that draws by rank, if activations or layers are split: rank 0 prints all modules."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shoal
from helpers.compiling import compiler_with
from helpers.exact_layers import BATCH, WAYS
from helpers.exact_models import build, dataset, loss
from helpers.ranks import Ranks
from shoal.strategies.coupling import notice

LAYOUT = "pipeline=2"
pytestmark = [pytest.mark.processes, pytest.mark.full]


def printed(world: shoal.World, way: str, model: str) -> str:
    """What this rank prints in the first step."""
    said = io.StringIO()
    compiler = patch.object(torch, "compile", compiler_with("eager"))
    every = patch.object(notice, "_SHOWN", 99)
    with compiler, every, contextlib.redirect_stdout(said):
        parallel: Any = shoal.parallelize(build(model), world, WAYS[way].strategy(model))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        step = shoal.Step(parallel, optimizer, shoal.Task(loss), compile="inductor")
        step(next(shoal.Loader(dataset(model, 24), world, batch_size=BATCH, micro_batches=3).epochs(1)))
    return said.getvalue()


@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param("Pipeline", "Untied GPT", marks=pytest.mark.long),
        ("Tensor", "GPT"),
        pytest.param("Context", "Even GPT", marks=pytest.mark.long),
    ],
)
def test_modules_of_all_stages_are_printed(ranks: Ranks, way: str, model: str) -> None:
    ranks.divide(WAYS[way].layouts[2])
    first, second = ranks.call(printed, way, model)
    assert second == ""
    assert "each rank draws its own random numbers" in first
    layers = {"drop", *(f"blocks.{n}.{name}" for n in "01" for name in ("drop", "attention"))}
    assert layers <= set(re.findall(r"[\w.]+", first))
