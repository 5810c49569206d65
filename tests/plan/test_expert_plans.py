"""Plans of mixtures of experts: what ranks hold, exchange and wait for."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers import mixtures
from helpers.causal_transformer import WIDTH
from helpers.cli import shoal as command
from helpers.ranks import Ranks
from shoal._torch.dispatch import tree_iter
from shoal.strategies.dtensor import share
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import find_machine
from shoal.tools.plan.search.fit import fit_plan, module_layouts, plan_of
from shoal.tools.plan.trace import TracedStep, numbers_of_experts, planned_strategies, trace_step
from shoal.tools.plan.work.assumed_routing import chosen_experts
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.slowest import busiest_load
from shoal.util.errors import ShoalError

TOKENS, FEATURES = 8, 2 * WIDTH


def mixture(*, listed: bool = False) -> nn.Module:
    """Return two linear layers and a mixture, whose experts are modules if `listed`."""
    mixed: Any = mixtures.Mixture()
    if listed:
        mixed.experts = mixtures.ExpertList(mixtures.EXPERTS, FEATURES).double()
    layers = (nn.Linear(FEATURES, FEATURES).double() for _ in range(2))
    return nn.Sequential(*layers, mixed)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def data(samples: int = 8) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(samples, TOKENS, FEATURES, dtype=torch.float64, generator=generator),)


def workload(samples: int = 8, strategy: Any = None, *, listed: bool = False) -> Workload:
    return Workload(partial(mixture, listed=listed), shoal.Task(squares), data(samples), strategy)


def planned(layout: str, devices: int, batch: int = 8) -> PlannedStep:
    return plan_of(layout, devices, batch, None, "none", "fp32")


class Grouped(nn.Module):
    """Experts whose products are one operation, as those of transformers by default."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts, order = index.flatten().sort()
        ends = experts.bincount(minlength=len(self.into)).cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(hidden[order // index.shape[1]], self.into, offs=ends)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, order // index.shape[1], rows)


class GroupedMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), Grouped()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).topk(2)
        mixed: Tensor = self.experts(x, index, weights)
        return mixed


def grouped(samples: int = 64) -> Any:
    return GroupedMixture, shoal.Task(squares), (torch.ones(samples, 16),)


def traced(plan: PlannedStep) -> TracedStep:
    return trace_step(workload, plan)


def held(world: shoal.World, plan: PlannedStep, listed: bool) -> tuple[int, int]:
    """Return the bytes of the parameters, and of the optimizer state, after a step."""
    torch.manual_seed(0)
    model = shoal.parallelize(mixture(listed=listed), world, planned_strategies(plan))
    optimizer = torch.optim.AdamW(model.parameters())
    step = shoal.Step(model, optimizer, shoal.Task(squares))
    step(next(iter(shoal.Loader(data(), world, batch_size=8).epochs(1))))
    states = [each for each in tree_iter([*optimizer.state.values()]) if isinstance(each, Tensor)]
    parameters, state = (sum(share(t).nbytes for t in each) for each in (model.parameters(), states))
    return parameters, state


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        "expert=2",
        pytest.param("replicate=2,expert=2", marks=pytest.mark.full),
        pytest.param("shard=2,expert=2", marks=pytest.mark.full),
    ],
)
def test_ranks_hold_what_is_planned(layout: str) -> None:
    plan = planned(layout, 4 if "," in layout else 2)
    with Ranks(plan.layout.size, layout=layout) as ranks:
        for listed in (False, True):
            found = trace_step(partial(workload, listed=listed), plan).memory.kinds
            expected = (found["parameters"], found["optimizer"])
            assert set(ranks.call(held, plan, listed)) == {expected}


def calls(step: TracedStep) -> Counter[tuple[str, int, int]]:
    """Return the number of collectives by operation, number of ranks and distance of neighbours."""
    each = [segment.collective for segment in step.segments if segment.collective]
    return Counter((one.operation, one.group.size, one.group.stride) for one in each)


def test_a_layer_exchanges_tokens_and_replicas_of_experts_sum_gradients() -> None:
    without = traced(planned("replicate=4", 4))
    found = traced(planned("replicate=2,expert=2", 4))
    # Counts, dispatch and combine, and the last two again in the backward pass.
    assert calls(found)["all_to_all", 2, 1] == 1 + 4
    assert calls(found)["all_reduce", 2, 2] > 0
    assert {size for _, size, _ in calls(without)} == {4}
    assert found.work.products == without.work.products > 0
    assert (without.imbalance, found.imbalance > 1) == (1.0, True)
    assert planned("expert=1,replicate=4", 4) == without.plan


def test_tensor_parallel_layers_and_experts_with_values() -> None:
    strategy = [shoal.TensorParallel(plan={"0": "column", "1": "row"}), shoal.ExpertParallel()]
    plan = planned("expert=2,tensor=2", 4)
    one, other = (
        trace_step(partial(workload, strategy=strategy), plan, fake=fake) for fake in (True, False)
    )
    assert one == other


def test_the_busiest_rank_has_as_many_tokens_as_random_routers_give_it() -> None:
    tokens, choices, experts, ranks = 32, 2, 8, 4
    scores = np.random.default_rng(0).random((1000, ranks * tokens, experts))
    chosen = np.argpartition(scores, choices, axis=-1)[..., :choices] // (experts // ranks)
    rows = np.stack([(chosen == rank).sum((1, 2)) for rank in range(ranks)])
    expected = rows.max(0).mean() / (tokens * choices)
    assert busiest_load(tokens, choices, experts, ranks) == pytest.approx(expected, rel=0.01)


def test_fewer_tokens_more_ranks_and_fewer_choices_are_less_balanced() -> None:
    usual = busiest_load(1000, 2, 16, 4)
    assert 1 < busiest_load(4000, 2, 16, 4) < usual < busiest_load(250, 2, 16, 4)
    assert busiest_load(1000, 2, 16, 2) < usual < busiest_load(1000, 2, 16, 8)
    assert busiest_load(1000, 4, 16, 4) < usual < busiest_load(1000, 1, 16, 4)
    assert busiest_load(1000, 2, 16, 1) == busiest_load(1000, 16, 16, 4) == 1


def test_choices_are_equal_or_as_uneven_as_asked() -> None:
    for place in range(4):
        even = chosen_experts(32, 2, 8, 4, place, 1.0)
        assert even.flatten().bincount().tolist() == [8] * 8
        counts = chosen_experts(32, 2, 8, 4, place, 1.5).flatten().bincount().view(4, 2)
        assert counts[place].tolist() == [12, 12]
        assert int(counts.sum()) == 64


def test_the_busiest_rank_prolongs_the_step_more_with_fewer_tokens() -> None:
    machine = find_machine("cpu")
    some, many = (
        fit_plan(lambda: Workload(*grouped(512)), planned("expert=2", 2, size), machine)
        for size in (64, 512)
    )
    assert some.imbalance > many.imbalance > 1
    for each in (some, many):
        added = each.time.parts["imbalance"]
        assert 0 < added < (each.imbalance - 1) * each.time.total


def test_grouped_products_have_flops() -> None:
    plan = planned("replicate=1", 1, 64)
    one, other = (trace_step(lambda: Workload(*grouped()), plan, fake=fake) for fake in (True, False))
    assert one == other
    # Inputs need no gradients.
    assert one.work.products == 2 * 2 * 64 * 16 * (4 + 2 * 16)


def test_layouts_have_the_degrees_that_divide_the_experts() -> None:
    node = find_machine("h100-sxm")
    found = {each.expert for each in module_layouts(12, node, numbers_of_experts(workload))}
    assert found == {1, 2, 4}
    assert {each.expert for each in module_layouts(12, node, {4, 6})} == {1, 2}
    dense = Workload(lambda: nn.Linear(2, 2), shoal.Task(squares), data())
    assert numbers_of_experts(lambda: dense) == set()


def test_layouts_that_experts_do_not_allow_are_errors() -> None:
    with pytest.raises(ShoalError, match="it has 4 experts, and ranks have equal numbers of them"):
        traced(planned("expert=8", 8))
    dense = Workload(lambda: nn.Linear(2, 2), shoal.Task(squares), data())
    with pytest.raises(ShoalError, match="leave the expert axis out"):
        trace_step(lambda: dense, planned("expert=2", 2))


def test_the_command_says_how_uneven_experts_are(tmp_path: Path) -> None:
    path = tmp_path / "mixture.py"
    path.write_text("from plan.test_expert_plans import grouped as build\n")
    words = ("plan", "--model", f"{path}:build", "--layout", "expert=2", "-n", "2", "--batch", "64")
    done = command(*words, "--precision", "fp32", "--json")
    assert done.exit_code == 0, done.output
    first = json.loads(done.stdout)["best"][0]
    assert first["strategy"] == "shoal.ExpertParallel()"
    assert first["imbalance"] == pytest.approx(busiest_load(32, 2, 4, 2))
    assert first["step"]["imbalance"] > 0
    done = command(*words, "--precision", "fp32")
    assert f"{100 * (first['imbalance'] - 1):.1f} % more tokens than the mean" in " ".join(
        done.stdout.split()
    )
