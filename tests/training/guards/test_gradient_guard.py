"""Bits flipped in the gradients of one rank: found in the same step, with the rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy, events_of
from shoal.training.guards.votes import Verdict, judge_gradients

RIGHT, WRONG, OTHER = {"w": 1, "b": 2}, {"w": 5, "b": 2}, {"w": 9, "b": 2}
GROUP = 2


def verdict(*ranks: int, outvoted: bool = True) -> Verdict:
    return Verdict(ranks=ranks, tensors=("w",), outvoted=outvoted)


@pytest.mark.parametrize(
    ("first", "again", "expected"),
    [
        ({1: WRONG, 0: RIGHT}, [RIGHT] * 3, verdict(1)),
        ({1: RIGHT, 0: WRONG}, [RIGHT] * 3, verdict(0)),
        ({1: WRONG, 0: RIGHT}, [RIGHT, OTHER, RIGHT], verdict(1)),
        ({1: WRONG, 0: RIGHT}, [RIGHT] * 2, verdict(1)),
        ({1: WRONG, 0: RIGHT}, [RIGHT, WRONG], verdict(0, 1, outvoted=False)),
        ({1: WRONG, 0: RIGHT}, [OTHER] * 2, verdict(0, 1, outvoted=False)),
        ({1: WRONG, 0: OTHER}, [RIGHT, RIGHT, RIGHT], verdict(0, 1)),
    ],
)
def test_the_majority_of_all_computations_is_right(
    first: dict[int, dict[str, int]], again: list[dict[str, int]], expected: Verdict
) -> None:
    assert judge_gradients(first, again) == expected


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(7, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Dropout(0.3), nn.Linear(9, 3)
    )


class FlippedBit:
    """A hook of a parameter that flips a bit of its gradient in some backward passes of a step."""

    def __init__(self, step: shoal.Step, passes: range) -> None:
        self.step, self.passes, self.calls = step, passes, 0

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.step.number != 1:  # the first check is on the second step
            return gradient
        self.calls += 1
        if self.calls - 1 not in self.passes:
            return gradient
        flipped = gradient.clone()
        flipped.numpy().reshape(-1).view(np.uint8)[2] ^= 4
        return flipped


def train(
    world: shoal.World,
    directory: Path,
    precision: str = "fp32",
    guards: shoal.Guards | None = None,
    passes: range = range(0),
) -> tuple[str, int, str]:
    """Train while rank 1 flips bits; return the error, the steps taken, and the state's SHA-256."""
    model = shoal.parallelize(make_model(), world, statistics=GROUP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(cross_entropy), clip=1.0, precision=precision)
    if world.rank == 1:
        model.get_parameter("4.weight").register_hook(FlippedBit(step, passes))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(44, 7, generator=generator), torch.arange(44) % 3
    loader = shoal.Loader(data, world, batch_size=20)
    error = ""
    with shoal.Run(directory, step, loader, trackers=(), guards=guards) as run:
        for batch in loader.epochs(6):
            try:
                step(batch)
            except shoal.CorruptionError as found:
                error = str(found)
                break
            run.tick()
    state = [*model.state_dict().values()]
    state += [value for each in optimizer.state.values() for value in each.values()]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).hexdigest()
    return error, step.number, digest


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, exact="bits") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, exact="bits") as ranks:
        yield ranks


@pytest.mark.processes
@pytest.mark.parametrize(
    "passes",
    [
        pytest.param(range(4, 5), id="in its own gradients"),
        pytest.param(range(1), id="in its computation for another rank"),
        pytest.param(range(99), id="always"),
    ],
)
def test_a_flipped_bit_is_found_in_the_same_step_and_the_rank_named(
    three: Ranks, tmp_path: Path, passes: range
) -> None:
    results = three.call(train, tmp_path, "fp32", shoal.Guards(), passes)
    ((error, steps, _),) = set(results)
    assert "rank 1 differs from the majority in the gradient of 4.weight" in error
    assert steps == 1
    (event,) = events_of(tmp_path, "corruption")
    assert (event["step"], event["guard"], event["ranks"]) == (2, "gradients", [1])


@pytest.mark.processes
def test_two_ranks_compute_again_and_both_are_named_if_that_does_not_decide(
    two: Ranks, tmp_path: Path
) -> None:
    (once, *_), _ = two.call(train, tmp_path / "once", "fp32", shoal.Guards(), range(5, 6))
    assert "rank 1 differs from the majority" in once
    (always, *_), _ = two.call(train, tmp_path / "always", "fp32", shoal.Guards(), range(99))
    assert "ranks 0, 1 differ in the gradient of 4.weight, without a majority" in always


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.long)])
def test_checks_raise_no_false_alarm_and_change_no_bit(
    three: Ranks, tmp_path: Path, precision: str
) -> None:
    often = shoal.Guards(budget=1.0, continuity=False)
    plain = three.call(train, tmp_path / "plain", precision)
    checked = three.call(train, tmp_path / "checked", precision, often)
    assert checked == plain
    assert plain[0][:2] == ("", 18)
    checks = {e["checked"]: e["checks"] for e in events_of(tmp_path / "checked", "guards")}
    assert checks["gradients"] >= 3
