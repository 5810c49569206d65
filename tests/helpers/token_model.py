"""A model in three parts over sentences, whose loss counts tokens, and its training."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.reference import LEARNING_RATE, SEED, Trained

WORDS, WIDTH, LENGTH, SAMPLES, BATCH, STEPS, CLIP = 11, 8, 5, 37, 16, 10, 0.3
IGNORE = -100
STAGES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"front": ("embedding", "blocks.0"), "back": ("blocks.1", "head")},
    3: {"front": ("embedding",), "middle": ("blocks",), "back": ("head",)},
    4: {"a": ("embedding",), "b": ("blocks.0",), "c": ("blocks.1",), "d": ("head",)},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return x + added


class Tagger(nn.Module):
    """What comes out of the embedding is needed again by the head, two stages later."""

    scale: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        early = x = self.drop(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x * self.scale + early)
        return logits


def build(dropout: float = 0.0) -> Tagger:
    torch.manual_seed(3)
    return Tagger(dropout).double()


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, IGNORE)
    labels[:, 0] = tokens[:, 0]
    return tokens, labels


def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch[1]
    total = F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (labels != IGNORE).sum()


def parts(
    world: shoal.World, strategy: Any, micro_batches: int = 4, dropout: float = 0.0
) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(build(dropout), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=CLIP)
    data = shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=micro_batches, seed=SEED)
    return step, data


def train(world: shoal.World, strategy: Any, micro_batches: int) -> tuple[Trained, dict[str, Any]]:
    """Ten steps, and an evaluation."""
    step, data = parts(world, strategy, micro_batches)
    results = [step(batch) for batch in itertools.islice(data.epochs(99), STEPS)]
    evaluated = shoal.evaluate(step, dataset(), metrics={"right": shoal.Accuracy()}, batch_size=10)
    parameters = {name: p.detach().numpy().copy() for name, p in step.model.named_parameters()}
    return Trained(parameters, [r.norm for r in results], [r.loss for r in results]), evaluated


@functools.cache
def expected() -> tuple[Trained, dict[str, float]]:
    """The same in plain torch: one process, whole batches, one mean."""
    model, (tokens, labels) = build(), dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    orders = (
        torch.from_numpy(shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES))
        for epoch in itertools.count()
    )
    norms, losses = [], []
    for some in itertools.islice((some for order in orders for some in order.split(BATCH)), STEPS):
        mean = F.cross_entropy(
            model(tokens[some]).flatten(0, 1), labels[some].flatten(), ignore_index=IGNORE
        )
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output, counted = model(tokens), labels != IGNORE
        right = int(((output.argmax(-1) == labels) & counted).sum()) / int(counted.sum())
        mean = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return Trained(parameters, norms, losses), {"loss": float(mean), "right": right}
