"""Loader(shares="measured"): samples by measured speed, exact, and repeated after a resume."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import shoal
from helpers.ranks import Ranks
from shoal.data.speed_balance import SpeedBalance
from shoal.tools.report import read_history
from shoal.tools.report.run_page.tables import splits_table

BATCH, MOST_STEPS, SAVED = 16, 1_000, 20
SLOW = 4e-3
"""Seconds per sample that rank 1 takes longer."""


class SlowOnRank1(nn.Linear):
    """Computes as usual, and on rank 1 takes longer for each sample, as slower hardware does."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * len(x))
        return super().forward(x)


def make_model(norm: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(0.2), nn.Linear(8, 2)).double()


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH * 7 + 6, 6, generator=generator).double(), torch.arange(BATCH * 7 + 6) % 2


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def trained(
    world: shoal.World, norm: nn.Module, micro_batches: int, samples: list[int] | None = None
) -> Tensor:
    """Return the parameters after two epochs, with `samples` of each rank in a batch."""
    model = shoal.parallelize(make_model(norm), world, statistics=4)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss), clip=1.0)
    shares = "equal" if samples is None else "measured"
    loader = shoal.Loader(
        dataset(), world, batch_size=BATCH, micro_batches=micro_batches, shares=shares
    )
    if samples is not None:
        loader.replay({0: samples}, 10**9)
    for batch in loader.epochs(2):
        if samples is not None and batch.size == BATCH:
            assert sum(micro.samples for micro in batch.micros) == samples[world.rank]
        step(batch)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_with_a_slow_rank(world: shoal.World, directory: Path, until: int) -> tuple[int, str]:
    """Train until a step, after a resume if there is a checkpoint; return the parameters' SHA-256.

    Stops before that 12 steps after the numbers of samples have changed, and returns the step too.
    """
    net = SlowOnRank1(6, 2).double()
    net.seconds = SLOW * world.rank
    model = shoal.parallelize(net, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    loader = shoal.Loader(dataset(), world, batch_size=BATCH, shares="measured")
    loader.balance = SpeedBalance(world, BATCH, least=1, steps=4, seconds=0.0)
    changed = 0
    with shoal.Run(directory, step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(MOST_STEPS):
            step(batch)
            run.tick()
            if step.number == SAVED:
                run.save()
            if not changed and loader.balance.shares != (BATCH // 2,) * 2:
                changed = step.number
            if step.number == (min(until, changed + 12) if changed else until):
                break
    values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return step.number, hashlib.sha256(b"".join(values)).hexdigest()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.processes
@pytest.mark.parametrize(
    ("norm", "micro_batches", "samples"),
    [(nn.BatchNorm1d(8), 1, [12, 4]), (nn.LayerNorm(8), 2, [13, 3])],
)
def test_unequal_numbers_of_samples_give_the_gradients_of_one_process(
    two: Ranks, norm: nn.Module, micro_batches: int, samples: list[int]
) -> None:
    with shoal.init(device="cpu") as world:
        expected = trained(world, copy.deepcopy(norm), micro_batches)
    for found in two.call(trained, norm, micro_batches, samples):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def shares_events(directory: Path) -> list[tuple[int, int, list[int]]]:
    lines = (directory / "events/rank-0.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "shares"]
    return [(event["step"], event["position"], event["samples"]) for event in events]


@pytest.mark.full
@pytest.mark.realtime
@pytest.mark.processes
def test_a_slow_rank_gets_fewer_samples_and_a_resumed_run_repeats_the_changes(
    two: Ranks, tmp_path: Path
) -> None:
    first = two.call(train_with_a_slow_rank, tmp_path, MOST_STEPS)
    changes = shares_events(tmp_path)
    step, _, (fast, slow) = changes[0]
    assert step > SAVED
    assert fast + slow == BATCH
    assert slow < fast
    rows = splits_table(read_history(tmp_path)).rows
    assert rows[0][1] == "8, 8"
    assert rows[1][1] == f"{fast}, {slow}"
    assert float(rows[1][4].split()[0]) > 1.1

    again = two.call(train_with_a_slow_rank, tmp_path, MOST_STEPS)  # from the save at step SAVED
    assert again == first
    assert shares_events(tmp_path) == 2 * changes


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("exact", "data", "shares", "found"),
    [
        ("rounding", torch.arange(8), "fast", "'equal', 'measured'"),
        ("rounding", Numbers(), "measured", "random access"),
        ("bits", torch.arange(8), "measured", "virtual ranks"),
    ],
)
def test_where_speed_is_not_measured(exact: str, data: Any, shares: str, found: str) -> None:
    with (
        shoal.init(device="cpu", exact=exact) as world,
        pytest.raises(shoal.DataError, match=found),
    ):
        shoal.Loader(data, world, batch_size=8, shares=shares)
