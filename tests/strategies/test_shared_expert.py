"""Shared experts, which compute while tokens are sent to the routed experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from helpers.causal_transformer import WIDTH
from helpers.mixtures import Mixture
from helpers.ranks import Ranks
from shoal.strategies.expert_parallel import exchange, shared_expert

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="expert=2") as started:
        yield started


class Noted(torch.autograd.Function):
    """Note the forward and the backward of what comes before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[str], what: str) -> Tensor:
        ctx.noted = notes, what
        notes.append(what)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        notes, what = ctx.noted
        notes.append(what)
        return gradient, None, None


class Shared(nn.Linear):
    """A shared expert that notes when it computes."""

    notes: list[str]

    def forward(self, x: Tensor) -> Tensor:
        noted: Tensor = Noted.apply(super().forward(x), self.notes, "shared")
        return noted


class OneName(Mixture):
    """A mixture that forgets the tokens of its experts, as DeepSeek-V3 of transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        before = x
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        x = x.flatten(0, -2)
        x = self.experts(x, index, weights)
        result: Tensor = x.view_as(before) + self.shared(before)
        return result


class SharedFirst(Mixture):
    """A mixture that calls the shared expert ahead of the others, as Qwen2-MoE does."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(x)
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed: Tensor = self.experts(x.flatten(0, -2), index, weights)
        return result + mixed.view_as(result)


class OtherInput(Mixture):
    """A mixture whose shared expert gets other activations."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed = self.experts(x.flatten(0, -2), index, weights)
        result: Tensor = self.shared(x.clone()) + mixed.view(*x.shape[:-1], -1)
        return result


class Between(Mixture):
    """A mixture that uses its input between the experts and the shared expert, and afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed = self.experts(x.flatten(0, -2), index, weights)
        gate = x.sigmoid()
        result: Tensor = self.shared(x) * gate + mixed.view(*x.shape[:-1], -1) + x.tanh()
        return result


def order_of_work(
    world: shoal.World, make: type[Mixture], ahead: bool, recompute: bool = False
) -> tuple[list[list[str]], Tensor]:
    """Return what happens in each of three steps, and a parameter after them."""
    notes: list[str] = []
    world.reseed("weights", by_rank=False)
    mixture = make(width=WIDTH)
    mixture.shared.__class__ = Shared
    vars(mixture.shared)["notes"] = notes
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture).double()
    strategy: list[Any] = [shoal.ActivationCheckpointing(modules=("1",))] if recompute else []
    with pytest.MonkeyPatch.context() as patch:
        for name, noted in (("start", "sent"), ("wait", "arrived")):
            plain: Any = getattr(exchange._Transfer, name)
            patch.setattr(exchange._Transfer, name, note(plain, notes, noted))
        if not ahead:
            patch.setattr(shared_expert.SharedForward, "_is_ahead", lambda *_: False)
        model = shoal.parallelize(model, world, [*strategy, shoal.ExpertParallel()])
        step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(squares))
        happened = []
        for batch in itertools.islice(
            shoal.Loader((torch.randn(8, 3, WIDTH).double(),), world, batch_size=8).epochs(9), 3
        ):
            notes.clear()
            step(batch)
            happened.append(notes.copy())
    return happened, model[0].weight.detach().clone()


def note(function: Any, notes: list[str], what: str) -> Any:
    def noted(self: Any, *given: Any) -> Any:
        if what == "sent" or self._work is not None:
            notes.append(what)
        return function(self, *given)

    return noted


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output[..., 0].numel()


AFTER, AHEAD = "sent arrived sent arrived shared", "sent shared arrived sent arrived"


@pytest.mark.parametrize(
    ("make", "recompute", "forward", "backward"),
    [
        (Mixture, False, AHEAD, "sent arrived sent shared arrived"),
        (Mixture, True, f"{AHEAD} {AHEAD}", "sent arrived sent shared arrived"),
        (OneName, False, AHEAD, "sent arrived sent shared arrived"),
        (Between, False, AHEAD, "sent arrived sent shared arrived"),
        (SharedFirst, False, "shared sent arrived sent arrived", AFTER),
        (OtherInput, False, AFTER, "shared sent arrived sent arrived"),
    ],
    ids=["layer's input", "recomputed", "one name", "used between", "called first", "other input"],
)
def test_the_shared_expert_computes_while_tokens_are_sent(
    two: Ranks, make: type[Mixture], recompute: bool, forward: str, backward: str
) -> None:
    found = two.call(order_of_work, make, True, recompute)
    plain = two.call(order_of_work, make, False, recompute)
    for (happened, weight), (before, other) in zip(found, plain, strict=True):
        assert happened[0] == before[0]  # the first step observes
        assert happened[1] == happened[2] == f"{forward} {backward}".split()
        assert torch.equal(weight, other)


class Dropping(nn.Linear):
    """A shared expert with dropout after the first step."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, self.training)


class Dropped(Mixture):
    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        self.shared.__class__ = Dropping


class Scaling(nn.Linear):
    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = super().forward(x) * self.scale
        return scaled


class Scaled(Mixture):
    """A mixture that sets an attribute of its shared expert just before it calls it."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        self.shared.__class__ = Scaling

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed = self.experts(x.flatten(0, -2), index, weights).view(*x.shape[:-1], -1)
        self.shared.scale = mixed.detach().square()
        result: Tensor = self.shared(x) + mixed
        return result


class Sometimes(Mixture):
    """A mixture that skips its shared expert, which has a BatchNorm, in each second step."""

    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        layers = nn.Flatten(0, 1), self.shared, nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (-1, 3))
        self.shared = nn.Sequential(*layers).double()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed: Tensor = self.experts(x.flatten(0, -2), index, weights).view(*x.shape[:-1], -1)
        self.calls += self.training
        result: Tensor = self.shared(x) + mixed if self.calls % 2 else mixed
        return result


class Repeated(Mixture):
    """A mixture that runs twice and recomputes only its experts."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.once(x)
        return x

    def once(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, -2)).softmax(-1).topk(2)
        mixed: Any = checkpoint(self.experts, x.flatten(0, -2), index, weights, use_reentrant=False)
        result: Tensor = (self.shared(x) + mixed.view(*x.shape[:-1], -1)).tanh()
        return result


def tensors_after(world: shoal.World, make: Any) -> list[Tensor]:
    """Return a parameter and the buffers after four steps."""
    world.reseed("weights", by_rank=False)
    mixture = make(width=WIDTH)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture).double()
    model = shoal.parallelize(model, world, shoal.ExpertParallel())
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), 0.01), shoal.Task(squares))
    inputs = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    data = shoal.Loader((inputs.double(),), world, batch_size=8)
    for batch in data.epochs(4):
        step(batch)
        mixture.shared.p = 0.5
    return [model[0].weight.detach().clone(), *model.buffers()]


@pytest.mark.parametrize("make", [Dropped, Scaled, Sometimes, Repeated])
def test_the_results_are_those_of_the_models_own_order(two: Ranks, make: type[Mixture]) -> None:
    with shoal.init() as world:
        expected = tensors_after(world, make)
    for found in two.call(tensors_after, make):
        for tensor, other in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-9)


def with_a_critic(world: shoal.World) -> Tensor:
    """Return a parameter after steps in which a model runs again before its first backward pass."""
    world.reseed("weights", by_rank=False)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(width=WIDTH)).double()
    strategy: Any = [shoal.ActivationCheckpointing(modules=("1",)), shoal.ExpertParallel()]
    model: Any = shoal.parallelize(module, world, strategy)
    critic = shoal.parallelize(nn.Linear(WIDTH, 1).double(), world, shoal.ExpertParallel(modules=()))
    both = [(model, torch.optim.AdamW(model.parameters()))]
    both.append((critic, torch.optim.AdamW(critic.parameters())))
    inputs = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    data = shoal.Loader((inputs.double(),), world, batch_size=8)
    for batch in data.epochs(3):
        for (x,) in batch:
            first = model(x)
            for part in (critic, model):
                loss = critic(first.detach()) if part is critic else first + 2 * model(x.tanh())
                batch.backward(total=loss.square().sum(), count=len(x), model=part)
                batch.finish(part)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    weight: Tensor = model[0].weight.detach().clone()
    return weight


def test_the_order_changes_between_forward_and_backward(two: Ranks) -> None:
    with shoal.init() as world:
        expected = with_a_critic(world)
    for found in two.call(with_a_critic):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
