"""Context parallelism: units on slices of sequences, equal to one process or refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.causal_transformer import GPT, VOCABULARY, loss, small_llama, texts
from helpers.mixtures import Trained
from helpers.ranks import RankError, Ranks
from shoal.strategies.context_parallel import sequence_slices, ulysses
from shoal.strategies.data_parallel import ddp
from shoal.strategies.dtensor import whole
from shoal.strategies.tensor_parallel import engine

pytestmark = pytest.mark.processes

STEPS = 10
HALF = 0.04
"""How far ten steps in bf16 stray from those in fp64, as everywhere."""

PLAN = {"blocks.*.wide": "column", "blocks.*.narrow": "row", "head": "head", "embedding": "vocabulary"}


def trained(
    world: shoal.World,
    strategy: Any,
    mutation: str = "",
    compiled: str | None = None,
    precision: str = "fp32",
) -> Trained:
    """Ten steps of AdamW: losses, norms, an evaluation, and the parameters."""
    world.reseed("weights", by_rank=False)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutation)
        made = GPT() if precision == "fp32" else GPT().float()  # autocast leaves float64 alone
        model = shoal.parallelize(made, world, strategy)
        step = shoal.Step(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            shoal.Task(loss),
            precision=precision,
            clip=0.5,
            compile=compiled,
        )
        data = shoal.Loader(texts(), world, batch_size=16, micro_batches=2)
        numbers = []
        for batch in itertools.islice(data.epochs(100), STEPS):
            result = step(batch)
            numbers += [result.loss, result.norm, result.counted]
    evaluated = shoal.evaluate(step, texts())
    numbers += [evaluated["loss"], evaluated["samples"]]
    return Trained(numbers, {name: whole(p.detach()) for name, p in model.named_parameters()})


def mutate(patch: pytest.MonkeyPatch, mutation: str) -> None:
    """Break what only gradients and counts show, in one way."""

    def bare_slice(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        peers = context.peers
        return gradient.chunk(peers.size, 1)[peers.index], None

    if mutation == "a gather without its factor":
        patch.setattr(sequence_slices._GatherSlices, "backward", staticmethod(bare_slice))
    elif mutation == "sums over samples alone":
        patch.setattr(engine, "summing_group", lambda world: None)
    elif mutation == "every rank counts":
        always = property(lambda _: True, lambda *_: None)
        patch.setattr(ddp.DDPReducer, "reports_loss", always, raising=False)
    elif mutation == "exchanges that keep what they got":
        kept = staticmethod(lambda context, gradient: (gradient, None))
        patch.setattr(ulysses._Exchange, "backward", kept)


@pytest.fixture(scope="module")
def expected() -> Trained:
    with shoal.init() as world:
        return trained(world, None)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="context=2") as started:
        yield started


@pytest.mark.parametrize(
    "strategy",
    [
        [shoal.ContextParallel(), shoal.DDP(bucket_cap_mb=0.001)],
        pytest.param(
            [shoal.ContextParallel(modules=("blocks.*",)), shoal.FSDP()], marks=pytest.mark.full
        ),
        pytest.param(
            [shoal.ActivationCheckpointing(), shoal.ContextParallel()], marks=pytest.mark.full
        ),
        pytest.param(
            [
                shoal.ContextParallel(),
                shoal.ActivationCheckpointing(),
                shoal.FSDP(reshard_after_forward=False, accumulate="whole"),
            ],
            marks=pytest.mark.full,
        ),
        pytest.param(
            [shoal.ContextParallel(modules=("blocks.1",)), shoal.ActivationCheckpointing()],
            marks=pytest.mark.full,
        ),
    ],
    ids=[
        "DDP",
        "FSDP",
        "ActivationCheckpointing before",
        "ActivationCheckpointing after",
        "some units",
    ],
)
def test_a_causal_model_trains_like_one_process(two: Ranks, expected: Trained, strategy: Any) -> None:
    for found in two.call(trained, strategy):
        assert found.distance(expected) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        shoal.FSDP(),
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in (shoal.DDP(), shoal.FSDP(param_dtype="bf16"))
        ),
    ],
)
def test_in_bf16_it_stays_close(two: Ranks, expected: Trained, strategy: Any) -> None:
    for found in two.call(trained, [shoal.ContextParallel(), strategy], "", None, "bf16"):
        assert 1e-5 < found.distance(expected) < HALF


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("context=2,tensor=2", [shoal.ContextParallel(), shoal.TensorParallel(plan=PLAN)]),
        pytest.param(
            "shard=2,context=2", [shoal.ContextParallel(), shoal.FSDP()], marks=pytest.mark.long
        ),
        ("replicate=2,context=2", [shoal.ContextParallel(), shoal.FSDP()]),
        pytest.param(
            "shard=2,context=2,tensor=2",
            [shoal.ContextParallel(), shoal.TensorParallel(plan=PLAN), shoal.FSDP()],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "replicate=2,context=2,tensor=2",
            [shoal.ContextParallel(), shoal.TensorParallel(plan=PLAN)],
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.full
def test_other_axes_divide_what_slices_leave(expected: Trained, layout: str, strategy: Any) -> None:
    with Ranks(shoal.Layout.parse(layout).size, layout=layout) as ranks:
        for found in ranks.call(trained, strategy):
            assert found.distance(expected) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutation", "strategy"),
    [
        ("a gather without its factor", shoal.DDP()),
        ("exchanges that keep what they got", shoal.DDP()),
        ("every rank counts", shoal.DDP()),
        ("sums over samples alone", shoal.TensorParallel(plan=PLAN)),
    ],
)
def test_the_comparison_notices_mutations(
    two: Ranks, expected: Trained, mutation: str, strategy: Any
) -> None:
    assert two.call(trained, [shoal.ContextParallel(), strategy], mutation)[0].distance(expected) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("strategy", [shoal.DDP(), shoal.FSDP()])
def test_compiled_it_trains_alike(two: Ranks, expected: Trained, strategy: Any) -> None:
    for found in two.call(trained, [shoal.ContextParallel(), strategy], "", "inductor"):
        assert found.distance(expected) < 1e-9


class Noisy(nn.Module):
    """What dropout inside and outside of a unit leaves, and a number that each rank draws in it."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(8, 8).double(), nn.Dropout(0.5), Drawing())
        self.outside = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.unit(x), self.outside(torch.ones_like(x))


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, torch.rand(1).double().expand(x.size(0), x.size(1), 1)), -1)


def noise(world: shoal.World, recompute: bool) -> tuple[Tensor, Tensor, Tensor]:
    world.reseed("weights", by_rank=False)
    strategies = [shoal.ActivationCheckpointing(modules=("unit",))] if recompute else []
    model = shoal.parallelize(Noisy(), world, [*strategies, shoal.ContextParallel(modules=("unit",))])
    inside, outside = model(torch.ones(2, 64, 8, dtype=torch.float64))
    loss = inside[..., :8].sum()
    loss.backward()
    gradient = model.get_parameter("unit.0.bias").grad
    assert gradient is not None
    return inside.detach(), outside, gradient


@pytest.mark.parametrize("recompute", [False, True])
def test_slices_drop_other_elements_and_all_else_is_drawn_alike(two: Ranks, recompute: bool) -> None:
    (inside, outside, gradient), (other, also, second) = two.call(noise, recompute)
    assert torch.equal(inside, other)  # gathered
    assert torch.equal(outside, also)
    (left, drawn), (right, also_drawn) = (part.split([8, 1], -1) for part in inside.chunk(2, 1))
    assert torch.equal(drawn, also_drawn)
    assert not torch.equal(left == 0, right == 0)
    # Of what was not dropped, each half on its rank: 2 for each element, times the ranks that sum it.
    halves = [4.0 * (part != 0).sum((0, 1)).double() for part in (left, right)]
    assert torch.allclose(gradient, halves[0])
    assert torch.allclose(second, halves[1])


def copied(world: shoal.World, directory: Path) -> list[str]:
    """What rank 0 does alone with a copy, on whole sequences; in a model that keeps its names."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(GPT(), world, shoal.ContextParallel())
    tokens = texts()[0]
    before = model(tokens).detach()
    shoal.export(model, directory / "model.pt2", example=(tokens,))
    if world.is_rank_zero:
        again = torch.export.load(directory / "model.pt2").module()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again):
            assert torch.allclose(other(tokens), before, rtol=0, atol=1e-12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world, "group", None)  # as in a world that is closed
            assert torch.allclose(model(tokens), before, rtol=0, atol=1e-12)
    world.barrier()
    return [name for name, _ in model.named_parameters()]


@pytest.mark.full
def test_copies_need_no_other_rank(two: Ranks, tmp_path: Path) -> None:
    names = [name for name, _ in GPT().named_parameters()]
    assert two.call(copied, tmp_path) == [names, names]


def scripted(world: shoal.World) -> None:
    trained(world, [shoal.ContextParallel(), shoal.DDP()], compiled="script")


def test_torchscript_is_refused(two: Ranks) -> None:
    for found in two.attempt(scripted):
        assert isinstance(found, RankError)
        assert "compile='inductor'" in str(found.error)


def resumed(world: shoal.World, directory: Path, steps: int) -> tuple[float, int]:
    """The last loss, with averaged parameters along, after so many steps in all."""
    world.reseed("weights", by_rank=False)
    strategy: Any = [shoal.ContextParallel(), shoal.FSDP()] if world.size > 1 else None
    model = shoal.parallelize(GPT(), world, strategy)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), shoal.Task(loss))
    ema = shoal.EMA(model, decay=0.9)
    data = shoal.Loader(texts(), world, batch_size=16)
    with shoal.Run(directory, step, data, state={"ema": ema}) as state:
        state.restore()
        for batch in data.epochs(100):
            step(batch)
            ema.update()
            state.tick()
            if step.number == steps:
                break
        state.save()
        with ema.applied():
            return shoal.evaluate(step, texts())["loss"], step.number


@pytest.mark.full
def test_a_run_goes_on_in_one_process_and_back(two: Ranks, tmp_path: Path) -> None:
    with shoal.init() as world:
        expected = resumed(world, tmp_path / "whole", 6)
    two.call(resumed, tmp_path / "cut", 2)
    with shoal.init() as world:
        resumed(world, tmp_path / "cut", 4)
    for found in two.call(resumed, tmp_path / "cut", 6):
        assert found == pytest.approx(expected, rel=1e-9)


class TwoLists(nn.Module):
    """Sequences that are cut, gathered, and cut again."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()
        self.further = nn.ModuleList(Layer() for _ in range(2))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model(tokens)
        for block in self.further:
            hidden = block(hidden)
        return hidden


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.layer(hidden))


def gathered_twice(world: shoal.World) -> list[float]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(TwoLists(), world, strategy_of(world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    batches = shoal.Loader(texts(), world, batch_size=16).epochs(2)
    return [number for batch in batches for number in step(batch)[:2]]


def test_gradients_are_right_where_sequences_are_cut_again(two: Ranks) -> None:
    with shoal.init(device="cpu") as world:
        expected = gathered_twice(world)
    for found in two.call(gathered_twice):
        assert found == pytest.approx(expected, rel=1e-9)


def llama(world: shoal.World) -> list[tuple[float, float]]:
    model = shoal.parallelize(small_llama(world, VOCABULARY), world, strategy_of(world))
    task = shoal.Task(lambda output, batch: loss(output.logits, batch), inputs=lambda batch: batch[0])
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task, clip=1.0)
    data = shoal.Loader(texts(), world, batch_size=8)
    return [(result.loss, result.norm) for batch in data.epochs(2) for result in [step(batch)]]


def strategy_of(world: shoal.World) -> Any:
    return shoal.ContextParallel() if world.size > 1 else None


@pytest.mark.full
def test_a_transformers_model_trains_like_one_process(two: Ranks) -> None:
    with shoal.init() as world:
        expected = llama(world)
    for found in two.call(llama):
        assert found == [pytest.approx(pair, rel=1e-9) for pair in expected]
