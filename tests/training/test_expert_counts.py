"""What a Run records of mixtures of experts: the choices of their routers, as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers.causal_transformer import LENGTH, SAMPLES, texts
from helpers.mixtures import CHOICES, MixedGPT, RoutedGPT, routed_loss
from helpers.ranks import Ranks
from shoal.telemetry.events import read_events
from shoal.tools.report import read_history
from shoal.tools.report.bottleneck import find_bottleneck
from shoal.tools.report.experts import ExpertLoad, expert_loads
from shoal.training import expert_counts

pytestmark = pytest.mark.processes

SIZE = 13
"""Four batches, of which the last is one sample: all ranks but one have a padding sample."""


def record(
    world: shoal.World, directory: Path, make: type[MixedGPT] = MixedGPT, biased: bool = False
) -> None:
    """Train for an epoch; with `biased`, all tokens choose the same experts of the second layer."""
    world.reseed("weights", by_rank=False)
    model: Any = make()
    if biased:
        model.blocks[1].narrow.router.bias.data[:2] = 100.0
    model = shoal.parallelize(model, world, shoal.ExpertParallel())
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(routed_loss))
    data = shoal.Loader(texts(), world, batch_size=SIZE)
    with shoal.Run(directory, step, data, trackers=()) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
        shoal.evaluate(step, texts())


def loads(directory: Path) -> list[ExpertLoad]:
    return expert_loads(read_history(directory))


@pytest.mark.parametrize(
    "layout", ["expert=2", pytest.param("replicate=2,expert=2", marks=pytest.mark.full)]
)
def test_counts_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    with shoal.init() as world:
        record(world, tmp_path / "one", RoutedGPT)
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        ranks.call(record, tmp_path / "ranks", RoutedGPT)
    for alone, found in zip(loads(tmp_path / "one"), loads(tmp_path / "ranks"), strict=True):
        assert (found.layer, found.step) == (alone.layer, 4)
        assert (found.tokens, found.dropped) == (alone.tokens, alone.dropped)
        assert sum(found.tokens) + found.dropped == SAMPLES * LENGTH * CHOICES
        assert found.dropped > 0
        assert found.imbalance is not None
        assert found.imbalance >= 1
        assert alone.imbalance is None


def test_a_collapsed_router_is_reported(tmp_path: Path) -> None:
    with Ranks(2, layout="expert=2") as ranks:
        ranks.call(record, tmp_path, MixedGPT, True)
    even, biased = loads(tmp_path)
    assert not even.collapsed
    assert (biased.collapsed, biased.idle, biased.imbalance) == (True, 2, 2.0)
    (text,) = [
        finding.text
        for finding in find_bottleneck(read_history(tmp_path)).findings
        if "router" in finding.text
    ]
    assert text == (
        "The router of blocks.1.narrow.experts has collapsed: up to step 4, the load is that of 2 of 4 "
        "experts; the busiest got 50 % of the tokens, and 2 got none."
    )


def test_counts_are_written_in_intervals(
    world: shoal.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_counts, "INTERVAL", 3)
    record(world, tmp_path)
    events = [e for e in read_events(tmp_path / "events/rank-0.jsonl") if e["event"] == "experts"]
    totals = [sum(event["layers"]["blocks.0.narrow.experts"]) for event in events]
    assert [event["step"] for event in events] == [3, 4]
    assert totals == [3 * SIZE * LENGTH * CHOICES, (SAMPLES - 3 * SIZE) * LENGTH * CHOICES]
