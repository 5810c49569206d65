"""Tensor parallelism: plans of one's own and of Hugging Face, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.causal_transformer import small_llama
from helpers.one_process import check_refused
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes
LAYOUT = "tensor=2"

VOCABULARY, LENGTH = 32, 6


def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits, labels = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


SEQUENCE = {
    **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.*_layernorm": "sequence",
    "model.norm": "sequence",
    "model.embed_tokens": "vocabulary",
    "lm_head": "logits",
}


def llama(world: shoal.World, plan: Any) -> list[tuple[float, float]]:
    """Losses and norms of a small Llama, divided by `plan` or by the plan that it carries."""
    model = small_llama(world, VOCABULARY)
    sharded = world.layout.degree("shard") > 1
    tensor = shoal.TensorParallel(plan=plan)
    strategy: Any = [tensor, shoal.FSDP()] if sharded else tensor
    model = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (20, LENGTH), generator=generator)
    data = shoal.Loader([{"input_ids": row} for row in tokens], world, batch_size=8)
    return [(result.loss, result.norm) for batch in data.epochs(3) for result in [step(batch)]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        pytest.param("tensor=2", {}, marks=pytest.mark.long),
        pytest.param("replicate=2,tensor=2", {}, marks=pytest.mark.full),
        pytest.param("shard=2,tensor=2", {}, marks=pytest.mark.long),
        pytest.param("tensor=2", SEQUENCE, marks=pytest.mark.long),
        pytest.param("shard=2,tensor=2", SEQUENCE, marks=pytest.mark.long),
    ],
)
def test_a_transformers_model_is_divided_by_its_own_plan_or_another(layout: str, plan: Any) -> None:
    with shoal.init() as world:
        expected = llama(world, {})
    with Ranks(4 if "," in layout else 2, layout=layout) as ranks:
        for found in ranks.call(llama, plan):
            assert found == [pytest.approx(pair, rel=1e-9) for pair in expected]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.wide = nn.Linear(6, 9)
        self.narrow = nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight


def spread(world: shoal.World, plan: dict[str, str], after: Any) -> None:
    strategy: Any = shoal.TensorParallel(plan=plan)
    shoal.parallelize(Net(), world, strategy if after is None else [strategy, after])


@pytest.mark.parametrize(
    ("plan", "after", "words"),
    [
        ({"wide": "columns"}, None, ["'columns'", "column, row, head, logits, vocabulary, sequence"]),
        ({"layers.*": "column"}, None, ["layers.*", "embedding, wide, narrow, norm, head"]),
        ({"norm": "column"}, None, ["norm is a torch.nn.modules.normalization.LayerNorm", "Linear"]),
        ({"wide": "column"}, None, ["tensor=2", "out_features = 9", "divides 9"]),
        ({"embedding": "vocabulary", "head": "row"}, None, ["head.weight", "one parameter", '"head"']),
        ({"embedding": "vocabulary"}, None, ["embedding.weight and head.weight", "one parameter"]),
        ({"wide": "column", "wid*": "row"}, None, ["another pattern shards wide by 'column'"]),
        ({"embedding": "vocabulary", "head": "head"}, shoal.DDP(), ["sharded parameters", "FSDP()"]),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(
    ranks: Ranks, plan: dict[str, str], after: Any, words: list[str]
) -> None:
    kinds = shoal.StepError | shoal.LayoutError
    check_refused(ranks, words, spread, plan, after, kind=kinds)


def backwards(world: shoal.World) -> None:
    shoal.parallelize(Net(), world, [shoal.FSDP(), shoal.TensorParallel(plan={"narrow": "row"})])


def nothing(world: shoal.World) -> None:
    shoal.parallelize(Net(), world, [])


def test_an_empty_list_is_no_strategy(ranks: Ranks) -> None:
    check_refused(ranks, "a strategy is an object such as shoal.DDP()", nothing)


def test_what_sums_gradients_comes_last(ranks: Ranks) -> None:
    check_refused(ranks, "[shoal.TensorParallel(plan=…), shoal.FSDP()]", backwards)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(self.norm(x))))  # type: ignore[no-any-return]


def at_once(world: shoal.World, groups: bool) -> float:
    plan = {"wide": "column", "narrow": "row"}
    model = shoal.parallelize(Small(), world, shoal.TensorParallel(plan=plan))
    norm = list(model.norm.parameters())
    layers = [*model.wide.parameters(), *model.narrow.parameters()]
    parts: list[Any] = [{"params": norm}, {"params": layers}] if groups else [*norm, *layers]
    optimizer = torch.optim.AdamW(parts, fused=True)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, optimizer, task)
    loader = shoal.Loader((torch.ones(4, 6),), world, batch_size=4)
    return [step(batch).loss for batch in loader.epochs(2)][-1]


def test_an_optimizer_that_updates_all_at_once_steps_on_shards_separately(ranks: Ranks) -> None:
    for groups in (True, False):
        first, second = ranks.call(at_once, groups)
        assert first == second
