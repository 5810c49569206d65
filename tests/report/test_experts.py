"""The load of experts, from events as ranks write them and as nobody should."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.synthetic_runs import BEGAN, simulate, write
from shoal.cli.main import app
from shoal.tools.report import read_history
from shoal.tools.report.experts import ExpertLoad, expert_loads

LAYER = "blocks.0.experts"


def written(
    directory: Path, ranks: Mapping[int, list[tuple[int, Any]]], layout: str
) -> list[ExpertLoad]:
    """Return the loads of a run whose ranks have written these layers at these steps."""
    write(directory, simulate(4, 10), start={"layout": layout})
    for rank, events in ranks.items():
        with (directory / "events" / f"rank-{rank}.jsonl").open("a") as file:
            for step, layers in events:
                event = {"event": "experts", "t": BEGAN + 1, "name": "step", "step": step}
                file.write(json.dumps({**event, "layers": layers}) + "\n")
    return expert_loads(read_history(directory))


def test_the_busiest_rank_is_that_of_its_own_group(tmp_path: Path) -> None:
    counts = [[6, 0, 0, 2, 1], [2, 2, 2, 2, 0], [0, 1, 1, 1, 0], [0, 0, 3, 2, 0]]
    events = {rank: [(8, {LAYER: [0, 9, 0, 0, 0]}), (10, {LAYER: c})] for rank, c in enumerate(counts)}
    events[3].append((12, {LAYER: [7, 7, 7, 7, 0]}))  # the others were killed before
    (load,) = written(tmp_path, events, "replicate=2,expert=2")
    assert (load.step, load.tokens, load.dropped) == (10, (8, 3, 6, 7), 1)
    assert load.imbalance == pytest.approx(10 / 6)  # of ranks with 10, 6, 1 and 7 tokens
    assert load.busiest == 8 / 24
    assert not load.collapsed
    found = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).output)
    assert found["experts"][0]["tokens"] == [8, 3, 6, 7]


@pytest.mark.parametrize(
    ("tokens", "collapsed"),
    [
        ((97, 1, 1, 1), True),
        ((50, 50, 0, 0), True),
        ((40, 40, 10, 10), False),
        ((0, 0, 0, 0), False),
        ((10,), False),
    ],
)
def test_a_router_that_uses_half_of_its_experts_or_less_has_collapsed(
    tokens: tuple[int, ...], collapsed: bool
) -> None:
    load = ExpertLoad(layer=LAYER, step=1, tokens=tokens, dropped=0, imbalance=None)
    assert load.collapsed is collapsed


@pytest.mark.parametrize(
    "layers", [None, [], {LAYER: None}, {LAYER: [3]}, {LAYER: [-1, 2]}, {LAYER: ["x", 1]}, {LAYER: {}}]
)
def test_counts_that_no_run_has_written_are_left_out(tmp_path: Path, layers: Any) -> None:
    assert written(tmp_path, {0: [(10, layers)]}, "expert=-1") == []


def test_ranks_that_disagree_are_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, {0: [(5, {LAYER: [1, 2, 0]})], 1: [(5, {LAYER: [1, 0]})]}, "x") == []
