"""Losses and limits of routers that count over the whole batch, at any number of ranks."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.mixtures import EXPERTS, Experts, RoutedGPT, trained
from helpers.ranks import Ranks
from shoal.data.coupling import layers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("expert=2", {"micro_batches": 1}),
        pytest.param(
            "replicate=2,expert=2", {"micro_batches": 2, "statistics": 4}, marks=pytest.mark.full
        ),
        pytest.param("shard=2,expert=2", {"micro_batches": 1}, marks=pytest.mark.full),
    ],
)
def test_a_routed_mixture_trains_like_one_process(layout: str, options: dict[str, Any]) -> None:
    run: Any = partial(trained, steps=8, make=RoutedGPT, **options)
    with shoal.init() as world:
        expected = run(world)
    assert float(expected.parameters["blocks.0.narrow.balancing.bias"].abs().max()) > 0.01
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(partial(run, strategy=shoal.ExpertParallel())):
            assert found.distance(expected) < 1e-9


def with_own_counts(world: shoal.World) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "add_up", lambda sums, part: sums)
        return trained(world, shoal.ExpertParallel(), steps=4, micro_batches=1, make=RoutedGPT)


@pytest.mark.full
def test_counts_of_each_rank_alone_are_noticed() -> None:
    with shoal.init() as world:
        expected = trained(world, steps=4, micro_batches=1, make=RoutedGPT)
    with Ranks(2, layout="expert=2") as ranks:
        assert ranks.call(with_own_counts)[0].distance(expected) > 1e-4


def test_the_balance_loss_is_that_of_the_switch_transformer() -> None:
    probabilities = torch.rand(3, 5, EXPERTS).softmax(-1)
    index = probabilities.topk(2).indices
    mask = torch.rand(3, 5) > 0.3
    fractions = F.one_hot(index, EXPERTS).sum(2)[mask].double().mean(0) / 2
    expected = EXPERTS * (fractions * probabilities[mask].mean(0)).sum() * mask.sum()
    found = shoal.BalanceLoss()(probabilities, index, mask)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("factor", [0.5, 1.0, 100.0])
def test_the_first_tokens_are_kept(factor: float) -> None:
    index = torch.rand(3, 5, EXPERTS).topk(2).indices
    kept = shoal.ExpertCapacity(EXPERTS, factor)(index).flatten().tolist()
    limit, counts, expected = factor * index.numel() / EXPERTS, [0] * EXPERTS, []
    for expert in index.flatten().tolist():
        expected.append(expert if counts[expert] < limit else EXPERTS)
        counts[expert] += 1
    assert kept == expected


def test_a_capacity_is_not_rounded_up() -> None:
    index = torch.zeros(1, 100, 1, dtype=torch.int64)  # 1.1 * 100 / 10 = 11.000000000000002
    assert int((shoal.ExpertCapacity(10, factor=1.1)(index) == 0).sum()) == 11


def before(world: shoal.World) -> Tensor:
    class Layer(shoal.Coupled):
        def forward(self, x: Tensor) -> Tensor:
            return self.groups(x).before(x)

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(1, 1))
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model = shoal.parallelize(model, world)
    loader = shoal.Loader((torch.ones(11, 1),), world, batch_size=11, shuffle=False)
    step = shoal.Step(
        model, torch.optim.SGD(model.parameters()), shoal.Task(lambda y, _: (y.sum(), len(y)))
    )
    for batch in loader.epochs(1):
        step(batch)
    return seen[-1]


def test_rows_are_counted_in_the_order_of_positions() -> None:
    with Ranks(3) as ranks:
        rows = torch.cat(ranks.call(before))
    assert rows.flatten().tolist() == list(range(11))


def test_choices_of_none_are_kept_and_do_not_count() -> None:
    index = torch.tensor([[[0, 2], [0, -1], [0, 1]]], dtype=torch.int32)
    assert shoal.ExpertCapacity(2, factor=1.0)(index).tolist() == [[[0, 2], [0, 2], [2, 1]]]


@pytest.mark.parametrize("flat", [torch.zeros(4, 2).long(), torch.zeros(1, 4, 2)])
def test_other_indices_are_refused(flat: Tensor) -> None:
    probabilities = torch.rand(1, 4, 2)
    for call in (
        shoal.ExpertCapacity(2),
        shoal.BalancingBias(2).count,
        partial(shoal.BalanceLoss(), probabilities),
    ):
        with pytest.raises(shoal.StepError, match="before the tokens of all samples are flattened"):
            call(flat)
    with pytest.raises(shoal.StepError, match="factor"):
        shoal.ExpertCapacity(2, factor=-1.0)


class Limited(nn.Module):
    """A mixture whose only layer of a router is a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.capacity = shoal.ExpertCapacity(2, factor=0.5)
        self.experts = Experts(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(1)
        kept = self.capacity(index)
        mixed: Tensor = self.experts(x.flatten(0, 1), kept.flatten(0, 1), weights.flatten(0, 1))
        return mixed.view(*x.shape[:-1], -1)


def what_is_said(world: shoal.World) -> str:
    world.reseed("weights", by_rank=False)
    x = torch.randn(16, 4, 8)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    with redirect_stdout(io.StringIO()) as said:
        model = shoal.parallelize(Limited(), world)
        step = shoal.Step(model, torch.optim.SGD(model.parameters()), task)
        for batch in shoal.Loader((x,), world, batch_size=8).epochs(1):
            step(batch)
    return said.getvalue()


def test_choices_that_depend_on_the_batch_are_not_reported() -> None:
    with Ranks(2) as ranks:
        assert "results depend" not in "".join(ranks.call(what_is_said))
