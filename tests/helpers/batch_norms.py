"""A network with every kind of BatchNorm: trained through Shoal, and in plain torch in one process."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.reference import LEARNING_RATE, SEED, Trained, _arrays, take_custom_step
from shoal.strategies.coupling.batch_norm import BATCH_NORMS

BATCH, SAMPLES, STEPS = 16, 42, 20
"""The last batch of an epoch has 10 samples."""
UNITS = ("blocks.*",)
PLAN = {"wide": "column", "narrow": "row"}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.convolution(x)))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Net(nn.Module):
    """BatchNorm3d, 2d, 1d and SyncBatchNorm, with all their options."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 3, (2, 3, 3), padding=(0, 1, 1))
        self.stem_norm = nn.BatchNorm3d(3, momentum=0.3)
        self.blocks = nn.ModuleList(
            [Block(), Block(affine=False), Block(track_running_stats=False), Block(momentum=None)]
        )
        self.flat = Flat()
        self.wide = nn.Linear(27, 8)
        self.narrow = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.synced = nn.SyncBatchNorm(5, momentum=1.0)
        self.head = nn.Linear(5, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(images)).squeeze(2)
        for block in self.blocks:
            x = block(x)
        x = self.narrow(torch.tanh(self.wide(self.flat(x))))
        logits: Tensor = self.head(torch.tanh(self.synced(torch.tanh(self.norm(x)))))
        return logits


def build() -> Net:
    torch.manual_seed(3)
    return Net().double()


def dataset(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 2, 3, 3, generator=generator, dtype=torch.float64)
    return images + 3, torch.randint(0, 3, (samples,), generator=generator)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


class Case(NamedTuple):
    way: str
    layout: str
    statistics: int | str
    micro_batches: int = 1
    samples: int = SAMPLES
    own: bool = False

    @property
    def size(self) -> int:
        return shoal.Layout.parse(self.layout).size if "-1" not in self.layout else 1


WAYS: dict[str, Any] = {
    "Single": None,
    "Compiled": None,
    "DDP": shoal.DDP(bucket_cap_mb=0.0005),
    "FSDP": shoal.FSDP(modules=UNITS),
    "Tensor": shoal.TensorParallel(plan=PLAN),
    "Pipeline": shoal.Pipeline(split_points=("wide",), schedule="gpipe"),
    "Recomputed, DDP": [shoal.ActivationCheckpointing(modules=UNITS), shoal.DDP()],
    "Recomputed, FSDP": [shoal.ActivationCheckpointing(modules=UNITS), shoal.FSDP(modules=UNITS)],
    "Recomputed, Pipeline": [
        shoal.ActivationCheckpointing(modules=UNITS),
        shoal.Pipeline(split_points=("wide",), schedule="gpipe"),
    ],
}


def in_groups(model: nn.Module, size: int) -> None:
    """Let the layers of a plain model normalize groups of `size` samples, one after the other."""
    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS):
            layer.forward = _split(layer, size)  # type: ignore[method-assign]


def _split(layer: nn.Module, size: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        return torch.cat([type(layer).forward(layer, part) for part in x.split(size)])

    return forward


def specification(statistics: int | str, samples: int = SAMPLES, steps: int = STEPS) -> Trained:
    """The training in plain torch, in one process, with whole batches."""
    model, (images, labels) = build(), dataset(samples)
    if isinstance(statistics, int):
        in_groups(model, statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    norms: list[float] = []
    losses: list[float] = []
    for epoch in itertools.count():
        order = shoal.Permutation(samples, seed=SEED, epoch=epoch).indices(0, samples)
        for indices in torch.from_numpy(order).split(BATCH):
            total, count = loss(model(images[indices]), (None, labels[indices]))
            mean = total / count
            mean.backward()
            norms.append(
                float(
                    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                )
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean.item())
            if len(losses) == steps:
                return trained(model, norms, losses)
    raise AssertionError


def trained(model: nn.Module, norms: list[float], losses: list[float]) -> Trained:
    found = Trained(_arrays(model), norms, losses)
    found.parameters |= {name: buffer.double().numpy().copy() for name, buffer in model.named_buffers()}
    return found


def train(world: shoal.World, case: Case, steps: int = STEPS) -> Trained:
    """The training through Shoal."""
    model, optimizer, step, loader = _made(world, case)
    norms, losses = [], []
    for batch in itertools.islice(loader.epochs(10_000), steps):
        result = take_custom_step(model, optimizer, batch, loss) if case.own else step(batch)
        norms.append(result.norm)
        losses.append(result.loss)
    return trained(model, norms, losses)


def resumed(world: shoal.World, case: Case, directory: str, until: int) -> Trained:
    """The training in a run directory, up to a step, after which its ranks may be killed."""
    model, _, step, loader = _made(world, case)
    with shoal.Run(directory, step, loader) as run:
        run.restore()
        for batch in loader.epochs(10_000):
            step(batch)
            if step.number == until:
                break
        run.save()
    return trained(model, [], [])


def _made(
    world: shoal.World, case: Case
) -> tuple[Any, torch.optim.Optimizer, shoal.Step, shoal.Loader]:
    given: Any = build()
    if case.way == "Compiled":
        given = torch.compile(given, backend="aot_eager")
    model = shoal.parallelize(given, world, WAYS[case.way], statistics=case.statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    loader = shoal.Loader(
        dataset(case.samples),
        world,
        batch_size=BATCH,
        micro_batches=case.micro_batches,
        seed=SEED,
    )
    return model, optimizer, step, loader
