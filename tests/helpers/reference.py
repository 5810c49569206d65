"""One process in plain torch, the specification, and the same training through Shoal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.strategies import engine_of
from shoal.strategies.correction import Totals
from shoal.strategies.dtensor import whole
from shoal.strategies.engine import ReducerEngine

SEED = 0
LEARNING_RATE = 1e-3
STEPS = 20
BATCH = 16
IGNORE = -100
TOLERANCE = 1e-9
SMALL_BUCKETS = shoal.DDP(bucket_cap_mb=0.001)

# How the models are divided: units of FSDP, layers of Tensor, stages of a pipeline.
UNITS = {"convolutional": ("features",), "transformer": ("block",)}
PLAN = {"block.linear1": "column", "block.linear2": "row", "embedding": "vocabulary", "head": "head"}
CUT = {
    "convolutional": ("features.1", "features.2", "head"),
    "transformer": ("block", "norm", "head"),  # the last on the rank of the first, tied to it
}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh())
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.embedding(tokens))))
        return logits


@dataclass(frozen=True)
class Row:
    model: str
    samples: int
    tokens: bool
    micro_batches: int
    raw: bool
    clip: float | None


ROWS = [
    Row(model, samples, tokens, micro_batches, raw, clip)
    for model, samples, tokens, micro_batches, raw, clip in itertools.product(
        ("convolutional", "transformer"),
        (96, 101, 3),
        (False, True),
        (1, 2, 4),
        (False, True),
        (None, 0.5),
    )
    if tokens is False or model == "transformer"
]


def dataset(row: Row) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if row.model == "convolutional":
        images = torch.randn(row.samples, 1, 6, 6, generator=generator, dtype=torch.float64)
        return images, torch.randint(0, 3, (row.samples,), generator=generator)
    tokens = torch.randint(0, 12, (row.samples, 6), generator=generator)
    labels = tokens.roll(-1, 1)
    if row.tokens:  # between none and all of the labels of a sample are ignored
        labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, IGNORE)
        labels[0] = tokens[0]
    return tokens, labels


def build(row: Row) -> nn.Module:
    torch.manual_seed(7)
    model = Convolutional() if row.model == "convolutional" else Transformer()
    return model.double()


def loss(row: Row, output: Tensor, target: Tensor) -> tuple[Tensor, int | Tensor]:
    losses = F.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=IGNORE, reduction="none"
    )
    if row.tokens:  # token-weighted: each label counts once
        return losses.sum(), (target != IGNORE).sum()
    # Sample-weighted: a sample counts once, however many labels it has.
    return losses.view(len(target), -1).mean(1).sum(), len(target)


@dataclass
class Trained:
    parameters: dict[str, np.ndarray[Any, Any]]
    norms: list[float]
    losses: list[float]


def specification(row: Row, steps: int = STEPS) -> Trained:
    """The same training in plain torch: one process, whole batches, one mean."""
    model, data = build(row), dataset(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    norms: list[float] = []
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        order = torch.from_numpy(
            shoal.Permutation(row.samples, seed=SEED, epoch=epoch).indices(0, row.samples)
        )
        for indices in order.split(BATCH):
            total, count = loss(row, model(data[0][indices]), data[1][indices])
            mean = total / count
            mean.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), row.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(norm))
            losses.append(mean.item())
            if len(losses) == steps:
                break
        epoch += 1
    return Trained(_arrays(model), norms, losses)


def take_custom_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: shoal.Batch,
    loss: Callable[[Any, Any], tuple[Tensor, Any]],
    clip: float | None = None,
) -> shoal.StepResult:
    """One step of a custom training loop. `loss` returns the sum and the count of a micro-batch."""
    for micro in batch:
        total, count = loss(model(micro[0]), micro)
        batch.backward(total=total, count=count, model=model)
    finished = batch.finish(model, clip=clip)
    optimizer.step()
    optimizer.zero_grad()
    return finished


def train(
    world: shoal.World,
    row: Row,
    mutation: str = "",
    strategy: Any = SMALL_BUCKETS,
    steps: int = STEPS,
    precision: str = "fp32",
) -> Trained:
    """The training through Shoal, on as many ranks as there are."""
    given, (inputs, labels) = build(row), dataset(row)
    if precision != "fp32":  # which here is float64; autocast leaves that as it is
        given = given.float()
        inputs = inputs.float() if inputs.is_floating_point() else inputs
    model = shoal.parallelize(given, world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    task = shoal.Task(lambda output, batch: loss(row, output, batch[1]))
    data = shoal.Loader(
        (inputs, labels), world, batch_size=BATCH, micro_batches=row.micro_batches, seed=SEED
    )
    if mutation:
        mutate(mutation, world, engine_of(model))
    step = None if row.raw else shoal.Step(model, optimizer, task, clip=row.clip, precision=precision)
    norms, losses = [], []
    for batch in itertools.islice(data.epochs(10_000), steps):
        if step is None:
            result = take_custom_step(model, optimizer, batch, task.loss, row.clip)
        else:
            result = step(batch)
        norms.append(result.norm)
        losses.append(result.loss)
    return Trained(_arrays(model), norms, losses)


def mutate(mutation: str, world: shoal.World, engine: Any) -> None:
    """Break the engine in one way that a user would not notice."""
    assert isinstance(engine, ReducerEngine)
    reducer = engine.reducer
    whole, backward = reducer.totals, reducer.backward

    def counts_samples() -> Totals:
        return whole().read()._replace(counted=float(BATCH))

    def stand_in_counts(loss: Tensor, count: Any, micro: Any, *rest: Any, **named: Any) -> None:
        backward(loss, count, micro._replace(weight=1.0), *rest, **named)

    def one_rank_silent(loss: Tensor, count: Any, micro: Any, *rest: Any, **named: Any) -> None:
        silent = loss * 0 if world.rank == world.size - 1 else loss
        backward(silent, count, micro, *rest, **named)

    if mutation == "no count correction":
        reducer.totals = counts_samples  # type: ignore[method-assign]
    elif mutation == "stand-in counts":
        reducer.backward = stand_in_counts  # type: ignore[method-assign]
    else:
        reducer.backward = one_rank_silent  # type: ignore[method-assign]


def _arrays(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: whole(p.detach()).cpu().numpy().copy() for name, p in model.named_parameters()}


def distance(found: Trained, expected: Trained, floor: float = LEARNING_RATE) -> float:
    """The design's measure over parameters, and the relative one over norms and losses."""
    worst = 0.0
    for name, value in expected.parameters.items():
        scale = max(float(np.abs(value).max()), floor)
        worst = max(worst, float(np.abs(found.parameters[name] - value).max()) / scale)
    for ours, theirs in ((found.norms, expected.norms), (found.losses, expected.losses)):
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)))
    return worst


def together(results: list[Trained]) -> list[Trained]:
    """The results, each with the stages of the other ranks of a pipeline."""
    every = {name: value for result in results for name, value in result.parameters.items()}
    for result in results:
        result.parameters = every | result.parameters
    return results
