"""The checks before the first step share their forward passes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import sgd, squares
from shoal.strategies.coupling.observed import digest
from shoal.training import trial_runs


class Counting(nn.Sequential):
    """Counts its forward passes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        output: Tensor = super().forward(x)
        return output


class Packed(Counting):
    """Returns an object that can't be cut in halves."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(scores=super().forward(x))


def packed_squares(output: Any, batch: Any) -> tuple[Tensor, int]:
    return squares(output.scores, batch)


class Centered(nn.Module):
    """Couples samples in a way that nobody declared."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


PLAIN, NORM, DROPOUT = (nn.Tanh(),), (nn.BatchNorm1d(4),), (nn.Dropout(0.3),)


def forwards(
    world: shoal.World, layers: tuple[nn.Module, ...], micro: int, random: str, packed: bool
) -> int:
    """Return the number of forward passes before those of the first step."""
    kind, loss = (Packed, packed_squares) if packed else (Counting, squares)
    model = kind(nn.Linear(4, 4), *layers)
    model = shoal.parallelize(model, world, statistics=8, random=random)
    step = shoal.Step(model, sgd(model), shoal.Task(loss))
    values = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    batch = next(shoal.Loader((values,), world, batch_size=32, micro_batches=micro).epochs(1))
    Counting.calls = 0
    step(batch)
    found = Counting.calls - micro
    step(batch)
    assert Counting.calls == found + 2 * micro
    return found


ROWS = [
    (PLAIN, 1, "samples", False, 1),
    (DROPOUT, 1, "samples", False, 3),
    (PLAIN, 2, "samples", False, 3),
    (NORM, 2, "samples", False, 3),
    (DROPOUT, 2, "samples", False, 3),
    (DROPOUT, 2, "ranks", False, 3),
    (PLAIN, 1, "samples", True, 3),
    (DROPOUT, 1, "samples", True, 3),
    ((Centered(),), 2, "samples", False, 7),
]


@pytest.mark.parametrize(("layers", "micro", "random", "packed", "expected"), ROWS)
def test_the_first_batch_runs_as_a_whole_and_in_halves(
    world: shoal.World,
    layers: tuple[nn.Module, ...],
    micro: int,
    random: str,
    packed: bool,
    expected: int,
) -> None:
    assert forwards(world, layers, micro, random, packed) == expected


@pytest.mark.processes
def test_ranks_run_the_first_batch_as_a_whole_and_in_halves(ranks: Ranks) -> None:
    assert ranks.call(forwards, (*NORM, *DROPOUT), 1, "samples", False) == [3, 3]


def test_a_long_trial_says_what_it_does(
    world: shoal.World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial_runs, "SECONDS", 0.0)
    written = ""

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal written
            deadline = time.monotonic() + 60
            while not written and time.monotonic() < deadline:
                written += capsys.readouterr().err
                time.sleep(0.001)
            return super().forward(x)

    model = shoal.parallelize(Slow(4, 4), world)
    step = shoal.Step(model, sgd(model), shoal.Task(squares))
    step(next(shoal.Loader((torch.randn(8, 4),), world, batch_size=8).epochs(1)))
    assert written == f"{trial_runs._TRIES}\n"
    monkeypatch.setattr(trial_runs, "SECONDS", 1e6)
    forwards(world, PLAIN, 1, "samples", False)
    assert not capsys.readouterr().err


def test_digests_leave_the_rows_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        rows = torch.randn(3, 5, dtype=dtype)
        kept = rows.clone()
        digest([rows])
        assert torch.equal(rows, kept)
