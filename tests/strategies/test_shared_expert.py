"""Shared experts, which compute while tokens are sent to the routed experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
            patch.setattr(shared_expert.SharedForward, "before_experts", lambda *_: None)
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
        (SharedFirst, False, "shared sent arrived sent arrived", AFTER),
        (OtherInput, False, AFTER, "shared sent arrived sent arrived"),
    ],
    ids=["layer's input", "recomputed", "one name", "called first", "other input"],
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
