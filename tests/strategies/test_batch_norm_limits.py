"""BatchNorm over groups: strategies that have no place for it, flattened inputs, evaluation."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import RankError, Ranks

pytestmark = pytest.mark.processes


def normalized() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def applied(world: shoal.World, strategy: Any) -> None:
    shoal.parallelize(normalized(), world, strategy)


@pytest.mark.parametrize(
    ("layout", "strategy", "found"),
    [
        (
            "pipeline=2",
            shoal.RPCPipeline(stages={"front": ("0",), "back": ("1",)}),
            "its stages run in threads, in any order",
        ),
        ("context=2", shoal.ContextParallel(modules=("0",)), "each rank has a slice of each sample"),
    ],
    ids=["RPCPipeline", "ContextParallel"],
)
def test_strategies_that_cannot_exchange_sums(
    ranks: Ranks, layout: str, strategy: Any, found: str
) -> None:
    ranks.divide(layout)
    for result in ranks.attempt(applied, strategy):
        assert isinstance(result, RankError)
        assert isinstance(result.error, shoal.StepError), result.text
        assert found in result.error.found
        assert "statistics='rank'" in result.error.fix
    ranks.divide("replicate=-1")


def test_replicas_in_threads_cannot_exchange_sums() -> None:
    with shoal.init(device="cpu") as world:
        cuda = patch.object(world, "device", torch.device("cuda"))
        with (
            cuda,
            patch.object(torch.cuda, "device_count", lambda: 2),
            pytest.raises(
                shoal.StepError, match=r"(?s)replicas are copies in separate threads.*statistics='rank'"
            ),
        ):
            shoal.parallelize(normalized(), world, shoal.DataParallel())


class Tokens(nn.Module):
    """Normalizes the rows of all tokens: (samples * length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.flatten(0, 1))
        return found.view_as(x)


def over_tokens(
    world: shoal.World, statistics: int | str, micro_batches: int
) -> tuple[list[float], Tensor]:
    model = shoal.parallelize(Tokens().double(), world, statistics=statistics)
    task = shoal.Task(lambda output, batch: (output.pow(3).sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(16, 5, 3, generator=generator, dtype=torch.float64)
    loader = shoal.Loader((data,), world, batch_size=8, micro_batches=micro_batches)
    return [step(batch).norm for batch in loader.epochs(2)], torch.clone(model.norm.running_var)  # type: ignore[arg-type]


def test_flattened_inputs_of_one_group(ranks: Ranks) -> None:
    with shoal.init(device="cpu") as world:
        norms, variance = over_tokens(world, "batch", 1)
    for found, ours in ranks.call(over_tokens, "batch", 1):
        assert found == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(ours, variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("statistics", "micro_batches"), [(2, 1), (2, 2)])
def test_flattened_inputs_of_several_groups_are_an_error(
    ranks: Ranks, statistics: int, micro_batches: int
) -> None:
    for result in ranks.attempt(over_tokens, statistics, micro_batches):
        if micro_batches == 2:  # each rank has one group of each micro-batch
            assert not isinstance(result, RankError), result.text
            continue
        assert isinstance(result, RankError)
        assert isinstance(result.error, shoal.StepError), result.text
        assert "2 groups" in result.error.found
        assert "one row for each sample" in result.error.fix


def evaluated(world: shoal.World, tracked: bool, batch_size: int) -> float:
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=tracked))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(12.0).view(4, 3).cos())
        model[1].weight.copy_(torch.arange(4.0) + 1)
    model = shoal.parallelize(model.double(), world)
    task = shoal.Task(lambda output, batch: (output.tanh().square().sum(), len(output)))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    found = shoal.evaluate(model, (data,), task=task, batch_size=batch_size)
    return float(found["loss"])


@pytest.mark.parametrize("tracked", [True, False])
def test_evaluation_depends_on_its_batches_only_without_running_statistics(
    ranks: Ranks, tracked: bool
) -> None:
    with shoal.init(device="cpu") as world:
        alone = {size: evaluated(world, tracked, size) for size in (6, 12)}
    assert (alone[6] == pytest.approx(alone[12], rel=1e-9)) == tracked
    for size, expected in alone.items():
        for found in ranks.call(evaluated, tracked, size):
            assert found == pytest.approx(expected, rel=1e-9)
