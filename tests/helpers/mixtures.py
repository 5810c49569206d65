"""A causal transformer with mixtures of experts, and its training on any layout."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.causal_transformer import GPT, LENGTH, WIDTH, loss, texts
from shoal.strategies.dtensor import whole

EXPERTS, CHOICES, FEATURES = 4, 2, 8
PLAN = {"blocks.*.wide": "head", "head": "head", "embedding": "vocabulary"}


class Experts(nn.Module):
    """Experts that compute one after the other, as in transformers."""

    dropout = 0.0

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.num_experts = number
        self.into = nn.Parameter(torch.randn(number, FEATURES, width) / width**0.5)
        self.out = nn.Parameter(torch.randn(number, WIDTH, FEATURES) / FEATURES**0.5)
        self.bias = nn.Parameter(torch.randn(number, WIDTH))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = hidden.new_zeros(len(hidden), WIDTH)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            inner = torch.tanh(F.linear(hidden[token], self.into[expert]))
            if self.dropout:
                inner = F.dropout(inner, self.dropout, self.training)
            output = F.linear(inner, self.out[expert], self.bias[expert])
            result = result.index_add(0, token, output * weights[token, choice, None])
        return result


class ExpertList(nn.ModuleList):
    """Experts that are modules, each of which may be idle."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(width, FEATURES), nn.Tanh(), nn.Linear(FEATURES, WIDTH))
            for _ in range(number)
        )

    computes_idle = False

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        result = hidden.new_zeros(len(hidden), WIDTH)
        for number, expert in enumerate(self):
            token, choice = torch.where(index == number)
            if self.computes_idle or len(token):
                output = expert(hidden[token]) * weights[token, choice, None]
                result = result.index_add(0, token, output)
        return result


class Mixture(nn.Module):
    """A router, its experts, and an expert for all tokens."""

    def __init__(self, number: int = EXPERTS, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = Experts(number, width)
        self.shared = nn.Linear(width, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(CHOICES)
        mixed: Tensor = self.experts(tokens, index, weights)
        result: Tensor = self.shared(x) + mixed.view(*x.shape[:-1], -1)
        return result


class MixedGPT(GPT):
    """A GPT whose second linear layers are mixtures."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.narrow = Mixture()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())  # for stages
        angles = torch.arange(LENGTH)[:, None] / 10.0 ** torch.arange(self.features)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; creates no tensors, as pipelines ask for."""
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines), word=self.words(tokens[:, 0]))
        logits: Tensor = self.head(self.norm(x))
        return logits


class Routed(Mixture):
    """A mixture with a balance loss, a capacity, and a bias of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.balance = shoal.BalanceLoss()
        self.capacity = shoal.ExpertCapacity(EXPERTS, factor=0.8)
        self.balancing = shoal.BalancingBias(EXPERTS, rate=0.01)
        self.loss = torch.zeros(())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; `loss` is the balance loss."""
        probabilities = self.router(x).softmax(-1)
        index = self.balancing(probabilities).topk(CHOICES).indices
        self.balancing.count(index)
        self.loss = self.balance(probabilities, index)
        weights = probabilities.gather(-1, index).flatten(0, 1)
        mixed = self.experts(x.flatten(0, 1), self.capacity(index).flatten(0, 1), weights)
        result: Tensor = self.shared(x) + mixed.view(*x.shape[:-1], -1)
        return result


class RoutedGPT(MixedGPT):
    """A GPT of such mixtures, which returns logits and the sum of their losses."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.narrow = Routed()

    def forward(self, tokens: Tensor) -> Any:
        """Return logits and loss."""
        logits = super().forward(tokens)
        blocks: list[Any] = list(self.blocks)
        losses = [block.narrow.loss for block in blocks]
        return logits, losses[0] + losses[1]


def routed_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss of the tokens, and the balance loss."""
    total, count = loss(output[0], batch) if isinstance(output, tuple) else loss(output, batch)
    return (total + 0.1 * output[1] if isinstance(output, tuple) else total), count


class ListedGPT(MixedGPT):
    """A GPT whose experts are lists, one of which is idle."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            mixture: Any = block.narrow
            mixture.experts = ExpertList(EXPERTS, 2 * WIDTH)
            mixture.router.bias.data[2] = -100.0
        self.double()


class ComputedGPT(ListedGPT):
    """The same, but idle experts compute without tokens, and get gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            mixture: Any = block.narrow
            mixture.experts.computes_idle = True


class DroppingGPT(MixedGPT):
    """A GPT with dropout inside its experts, which are parameters or modules."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[Any] = list(self.blocks)
        blocks[0].narrow.experts.dropout = 0.3
        blocks[1].narrow.experts = ExpertList(EXPERTS, 2 * WIDTH)
        for expert in blocks[1].narrow.experts:
            expert.insert(2, nn.Dropout(0.3))
        self.double()


class Packed(Mixture):
    """A mixture for some of the tokens: other numbers of them on each rank."""

    declares = True
    """Whether it tells the sample of each token."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > 0
        tokens = x[kept]
        weights, index = self.router(tokens).softmax(-1).topk(CHOICES)
        samples = torch.arange(len(x)).repeat_interleave(kept.sum(1))
        with shoal.samples(index=samples) if self.declares else nullcontext():
            mixed = self.experts(tokens, index, weights)
        result: Tensor = self.shared(x)
        return result + torch.zeros_like(result).index_put((kept,), mixed)


class PackedGPT(MixedGPT):
    """A GPT of such mixtures, with dropout inside the experts."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.narrow = Packed()
            block.narrow.experts.dropout = 0.3
        self.double()


class Untold(PackedGPT):
    """The same without the sample of each token."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[Any] = list(self.blocks)
        for block in blocks:
            block.narrow.declares = False


class Choosing(Mixture):
    """A mixture whose experts choose tokens of each sample (Zhou et al. 2022)."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.topk(x.shape[1] // 2, 1).indices
        taken = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, True)
        index = torch.arange(weights.shape[-1]).where(taken, -1)
        tokens = [each.flatten(0, 1) for each in (x, index, weights)]
        result: Tensor = self.shared(x) + self.experts(*tokens).view(*x.shape[:-1], -1)
        return result


class ChoosingGPT(MixedGPT):
    """A GPT of such mixtures."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.narrow = Choosing()
        self.double()


class Trained(NamedTuple):
    """Losses, norms and counts of each step, an evaluation, and the parameters."""

    numbers: list[float]
    parameters: dict[str, Tensor]
    """With the buffers."""

    def distance(self, other: Trained) -> float:
        """Return the largest relative difference."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        apart = [abs(one - two) / abs(two) for one, two in pairs]
        for name, value in self.parameters.items():  # those of a stage, in a pipeline
            expected = other.parameters[name]
            scale = max(float(expected.abs().max()), 1e-3)
            apart.append(float((value - expected).abs().max()) / scale)
        return max(apart)


def trained(
    world: shoal.World,
    strategy: Any = None,
    steps: int = 20,
    micro_batches: int = 2,
    compiled: str | None = None,
    make: type[MixedGPT] = MixedGPT,
    statistics: int | str = "batch",
    directory: Path | None = None,
) -> Trained:
    """Train for some steps of AdamW in all, from what `directory` has."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(make(), world, strategy, statistics=statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(routed_loss), clip=0.5, compile=compiled)
    ema = shoal.EMA(model, decay=0.9)
    data = shoal.Loader(texts(), world, batch_size=16, micro_batches=micro_batches)
    numbers = []
    run = None if directory is None else shoal.Run(directory, step, data, state={"ema": ema})
    if run is not None:
        run.restore()
    for batch in itertools.islice(data.epochs(100), steps - step.number):
        result = step(batch)
        ema.update()
        numbers += [result.loss, result.norm, result.counted]
    if run is not None:
        run.save()
        run.close()
    for average in (False, True):
        with ema.applied() if average else torch.no_grad():
            evaluated = shoal.evaluate(step, texts())
        numbers += [evaluated["loss"], evaluated["samples"]]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Trained(numbers, {name: whole(each.detach()) for name, each in tensors.items()})
