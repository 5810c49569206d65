"""Expert parallelism: experts that are divided over ranks, equal to one process or refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shoal
from helpers.causal_transformer import WIDTH
from helpers.mixtures import (
    PLAN,
    ChoosingGPT,
    ComputedGPT,
    DroppingGPT,
    Experts,
    ListedGPT,
    Packed,
    PackedGPT,
    Trained,
    Untold,
    trained,
)
from helpers.ranks import Ranks
from shoal.strategies import mesh_reducer
from shoal.strategies.expert_parallel import exchange, experts

pytestmark = pytest.mark.processes

EXPERTS = shoal.ExpertParallel()


@pytest.fixture(scope="module")
def expected() -> Trained:
    with shoal.init() as world:
        return trained(world)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="expert=2") as started:
        yield started


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (EXPERTS, {}),
        ([EXPERTS, shoal.FSDP()], {"micro_batches": 1}),
        ([shoal.ActivationCheckpointing(), EXPERTS], {}),
        pytest.param(
            [EXPERTS, shoal.FSDP(accumulate="whole", reshard_after_forward=False)],
            {"micro_batches": 3},
            marks=pytest.mark.full,
        ),
        pytest.param(EXPERTS, {"compiled": "blocks"}, marks=pytest.mark.full),
        pytest.param(
            [shoal.ActivationCheckpointing(), EXPERTS, shoal.FSDP()], {}, marks=pytest.mark.full
        ),
    ],
    ids=["replicated", "FSDP", "recomputed", "whole sums", "compiled", "recomputed FSDP"],
)
def test_a_mixture_trains_like_one_process(
    two: Ranks, expected: Trained, strategy: Any, options: dict[str, Any]
) -> None:
    for found in two.call(partial(trained, strategy=strategy, **options)):
        assert found.distance(expected) < 1e-9


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ("expert=2", ListedGPT),
        ("expert=2", ComputedGPT),
        ("replicate=2", ListedGPT),
        *(
            pytest.param(layout, ListedGPT, marks=pytest.mark.full)
            for layout in ("expert=4", "shard=2,expert=2", "expert=2,tensor=2")
        ),
    ],
)
def test_experts_in_a_list_train_like_one_process(layout: str, make: type[ListedGPT]) -> None:
    with shoal.init() as world:
        expected = trained(world, None, 6, make=make)
    tensor = [shoal.TensorParallel(plan=PLAN)] if "tensor" in layout else []
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(partial(trained, strategy=[*tensor, EXPERTS], steps=6, make=make)):
            assert found.distance(expected) < 1e-9


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("expert=2", [shoal.ActivationCheckpointing(), EXPERTS]),
        pytest.param("replicate=2", EXPERTS, marks=pytest.mark.full),
        ("pipeline=2", [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))]),
        pytest.param(
            "pipeline=2,expert=2",
            [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))],
            marks=pytest.mark.full,
        ),
        pytest.param("shard=2,expert=2", EXPERTS, marks=pytest.mark.long),
    ],
)
def test_dropout_inside_experts_belongs_to_samples(layout: str, strategy: Any) -> None:
    with shoal.init() as world:
        expected = trained(world, EXPERTS, 4, make=DroppingGPT)
        cut = trained(world, EXPERTS, 4, micro_batches=3, make=DroppingGPT)
    assert cut.distance(expected) < 1e-9
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(partial(trained, make=DroppingGPT), strategy, 4):
            assert found.distance(expected) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("expert=4", EXPERTS),
        ("replicate=2,expert=2", EXPERTS),
        ("shard=2,expert=2", EXPERTS),
        ("expert=2,tensor=2", [shoal.TensorParallel(plan=PLAN), EXPERTS]),
        ("expert=2,context=2", [shoal.ContextParallel(), EXPERTS]),
        ("pipeline=2,expert=2", [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))]),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("shard=2,expert=4", EXPERTS),
                ("replicate=2,shard=2,expert=2", EXPERTS),
                ("shard=2,expert=2,tensor=2", [shoal.TensorParallel(plan=PLAN), EXPERTS, shoal.FSDP()]),
                (
                    "pipeline=2,shard=2,expert=2",
                    [EXPERTS, shoal.Pipeline(split_points=("blocks.1",))],
                ),
            )
        ),
    ],
)
def test_other_axes_divide_the_rest(expected: Trained, layout: str, strategy: Any) -> None:
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(trained, strategy):
            assert found.distance(expected) < 1e-9


def untold(world: shoal.World) -> str:
    with redirect_stdout(io.StringIO()) as said:
        trained(world, EXPERTS, 2, make=Untold)
    return said.getvalue()


def test_experts_may_choose_their_tokens(two: Ranks) -> None:
    with shoal.init() as world:
        expected = trained(world, steps=4, make=ChoosingGPT)
    for found in two.call(partial(trained, strategy=EXPERTS, steps=4, make=ChoosingGPT)):
        assert found.distance(expected) < 1e-9


def test_experts_that_draw_may_get_any_tokens_of_a_sample(two: Ranks) -> None:
    with shoal.init() as world:
        expected = trained(world, EXPERTS, 4, make=PackedGPT)
    for found in two.call(partial(trained, make=PackedGPT), EXPERTS, 4):
        assert found.distance(expected) < 1e-9
    assert "shoal.samples(index=…) tells the sample of each row" in two.call(untold)[0]


def resumed(world: shoal.World, directory: Path, steps: int) -> Trained:
    strategy = EXPERTS if world.size > 1 else None
    return trained(world, strategy, steps, directory=directory)


@pytest.mark.full
def test_a_run_resumes_on_other_numbers_of_ranks(two: Ranks, tmp_path: Path) -> None:
    with shoal.init() as world:
        expected = resumed(world, tmp_path / "whole", 6)
    two.call(resumed, tmp_path / "cut", 2)
    with Ranks(4, layout="shard=2,expert=2") as four:
        four.call(resumed, tmp_path / "cut", 3)
    with shoal.init() as world:
        resumed(world, tmp_path / "cut", 4)
    for found in two.call(resumed, tmp_path / "cut", 6):
        numbers = expected.numbers[-len(found.numbers) :]
        assert found.distance(expected._replace(numbers=numbers)) < 1e-9


def mutate(patch: pytest.MonkeyPatch, mutation: str) -> None:
    """Make one of the mistakes that were reported of other libraries."""

    def twice(context: Any, gradient: Tensor) -> Any:
        return 2 * received(context, gradient)[0], None, None

    def lost(context: Any, gradient: Tensor) -> Any:
        return torch.zeros_like(received(context, gradient)[0]), None, None

    def without_router(
        self: Any, module: Any, hidden: Tensor, index: Tensor, weights: Tensor, *keys: Any
    ) -> Any:
        return dispatched(self, module, hidden, index, weights.detach(), *keys)

    received = exchange._Started.backward
    dispatched, group = experts.DividedExperts._dispatched, mesh_reducer.summing_group
    if mutation == "gradients times the degree":
        patch.setattr(exchange._Started, "backward", staticmethod(twice))
    elif mutation == "gradients of tokens lost":
        patch.setattr(exchange._Started, "backward", staticmethod(lost))
    elif mutation == "no gradient of the router":
        patch.setattr(experts.DividedExperts, "_dispatched", without_router)
    elif mutation == "experts summed over all ranks":
        patch.setattr(mesh_reducer, "over_experts", lambda parameter: False)
    elif mutation == "experts of replicas not summed":
        patch.setattr(mesh_reducer, "summing_group", lambda w, *out: None if out else group(w))
    elif mutation == "experts counted several times in the norm":
        patch.setattr(mesh_reducer, "parts", lambda parameter: 4)
    elif mutation == "experts counted too little in the norm":
        patch.setattr(mesh_reducer, "parts", lambda parameter: 1)


def mutated(world: shoal.World, mutation: str) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutation)
        return trained(world, EXPERTS, 3)


@pytest.mark.full
def test_mistakes_of_other_libraries_are_noticed() -> None:
    with shoal.init() as world:
        expected = trained(world, None, 3)
    mistakes = (
        "gradients times the degree",
        "gradients of tokens lost",
        "no gradient of the router",
        "experts summed over all ranks",
        "experts of replicas not summed",
        "experts counted several times in the norm",
        "experts counted too little in the norm",
    )
    with Ranks(4, layout="replicate=2,expert=2") as ranks:
        assert ranks.call(mutated, "")[0].distance(expected) < 1e-9
        for mistake in mistakes:
            assert ranks.call(mutated, mistake)[0].distance(expected) > 1e-4, mistake


def some_choices(world: shoal.World, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of tokens of which rank 0 has none, and some no experts."""
    world.reseed("weights", by_rank=False)
    experts = Experts(4, 8).double()
    tokens = torch.randn(6, 8, dtype=torch.float64)
    index = torch.tensor([[0, 1], [2, -1], [3, 4], [1, 0], [-1, 4], [2, 3]], dtype=kind)
    if world.size > 1:
        experts = shoal.parallelize(experts, world, EXPERTS)
        tokens, index = (each[:0] if world.rank == 0 else each for each in (tokens, index))
    tokens = tokens.clone().requires_grad_()
    output: Tensor = experts(tokens, index, tokens[:, :2].sigmoid())
    output.square().sum().backward()
    assert tokens.grad is not None
    return output.detach(), tokens.grad


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_ranks_without_tokens_and_choices_of_none(two: Ranks, kind: torch.dtype) -> None:
    with shoal.init() as world:
        expected = some_choices(world, kind)
    for found, wanted in zip(two.call(some_choices, kind)[1], expected, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def penalized(world: shoal.World) -> Tensor:
    world.reseed("weights", by_rank=False)
    experts = shoal.parallelize(Experts(4, 8).double(), world, EXPERTS)
    tokens = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    output = experts(tokens, torch.arange(12).view(6, 2) % 4, tokens[:, :2].sigmoid())
    (gradient,) = torch.autograd.grad(output.sum(), tokens, create_graph=True)
    (result,) = torch.autograd.grad(gradient.square().sum(), tokens)
    return result


def test_gradients_of_gradients(two: Ranks) -> None:
    with shoal.init() as world:
        expected = penalized(world)
    for found in two.call(penalized):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class Unused(ListedGPT):
    """A GPT that has run on other tokens, without a backward pass, before it trains."""

    def forward(self, tokens: Tensor) -> Tensor:
        blocks: list[Any] = list(self.blocks)
        if torch.is_grad_enabled():
            for block in blocks:
                hidden = torch.zeros(1, 2 * WIDTH, dtype=torch.float64)
                block.narrow.experts(hidden, torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.float64))
        return super().forward(tokens)


def test_experts_are_used_where_gradients_flow(two: Ranks) -> None:
    with shoal.init() as world:
        expected = trained(world, steps=4, make=Unused)
    for found in two.call(partial(trained, strategy=EXPERTS, steps=4, make=Unused)):
        assert found.distance(expected) < 1e-9


def late(world: shoal.World) -> list[float]:
    world.reseed("weights", by_rank=False)
    mixture = Packed()
    mixture.experts.dropout = 0.3
    model = shoal.parallelize(mixture, world, EXPERTS)
    inputs = torch.randn(32, 4, 2 * WIDTH, dtype=torch.float64)
    inputs[:16, :, 0] = -1.0
    step = shoal.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        shoal.Task(lambda output, _: (output.square().sum(), len(output))),
    )
    data = shoal.Loader((inputs,), world, batch_size=16, shuffle=False, micro_batches=2)
    return [step(batch).loss for batch in data.epochs(1)]


def test_experts_that_draw_may_get_no_token_at_first(two: Ranks) -> None:
    with shoal.init() as world:
        expected = late(world)
    for found in two.call(late):
        assert found == pytest.approx(expected, rel=1e-9)


def rounded(world: shoal.World) -> Tensor:
    world.reseed("weights", by_rank=False)
    experts = shoal.parallelize(Experts(4, 64), world, EXPERTS)
    tokens = torch.randn(64, 64)
    weights, index = torch.randn(64, 4).softmax(-1).topk(2)
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = experts(tokens, index, weights)
    assert output.dtype == torch.float32
    return output.detach()


def test_mixed_precision_rounds_more_than_the_output_tells(two: Ranks) -> None:
    with shoal.init() as world:
        expected = rounded(world)
    for found in two.call(rounded):
        assert torch.allclose(found, expected, rtol=0, atol=0.05)


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        experts_implementation="eager",  # the others don't compute in float64
        eos_token_id=1,
        **{"num_local_experts" if kind == "Mixtral" else "num_experts": 4},
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def next_tokens(output: Any, batch: Tensor) -> tuple[Tensor, int]:
    logits, labels = output.logits[:, :-1], batch[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


def fine_tuned(world: shoal.World, kind: str, before: Path, after: Path) -> Tensor:
    """Load what `before` has, train, export to `after`, and return logits."""
    make = partial(hugging_face, kind)
    model = shoal.parallelize(make, world, EXPERTS if world.size > 1 else None, empty=True)
    shoal.load(model, before)
    task = shoal.Task(next_tokens, inputs=lambda batch: {"input_ids": batch})
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task)
    texts = torch.arange(20 * 6).view(20, 6) % 31
    for batch in shoal.Loader(texts, world, batch_size=8).epochs(1):
        step(batch)
    shoal.export(model, after, max_shard_size="10KB")
    with torch.no_grad():
        logits: Tensor = model(texts[:2]).logits
    return logits


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe"])
def test_mixtures_of_transformers_are_loaded_trained_and_exported(kind: str, tmp_path: Path) -> None:
    hugging_face(kind).save_pretrained(tmp_path / "before", max_shard_size="10KB")
    with shoal.init() as world:
        expected = fine_tuned(world, kind, tmp_path / "before", tmp_path / "one")
    with Ranks(4, layout="replicate=2,expert=2") as ranks:
        found = ranks.call(fine_tuned, kind, tmp_path / "before", tmp_path / "four")
    again = type(hugging_face(kind)).from_pretrained(tmp_path / "four", experts_implementation="eager")
    texts = torch.arange(12).view(2, 6)
    assert torch.allclose(found[0], expected, rtol=0, atol=1e-12)
    assert torch.allclose(again.double()(texts).logits, found[0], rtol=0, atol=1e-12)
