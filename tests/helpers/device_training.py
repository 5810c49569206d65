"""A small network, trained through Shoal on any device and any number of ranks, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.reference import LEARNING_RATE, SEED

SAMPLES, WIDTH, CLASSES, BATCH = 96, 64, 4, 16
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
"""By dtype, how far losses stray from those of plain torch, which computes in another order."""


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)
    )


def dataset(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def contrast(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A loss that compares each sample with all samples of the global batch."""
    everyone, start = shoal.gather(output)
    own = torch.arange(start, start + len(output), device=output.device)
    return F.cross_entropy(output @ everyone.T, own, reduction="sum"), len(output)


class Training:
    """A network, its Step and its Loader on a world's device."""

    def __init__(
        self,
        world: shoal.World,
        dtype: torch.dtype = torch.float32,
        *,
        micro_batches: int = 1,
        strategy: Any = None,
        dropout: float = 0.0,
        objective: Callable[[Tensor, Any], tuple[Tensor, int]] = loss,
        **options: Any,
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.model = shoal.parallelize(network(dropout).to(wide), world, strategy)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        self.step = shoal.Step(
            self.model, optimizer, shoal.Task(objective), clip=1.0, precision=precision, **options
        )
        self.loader = shoal.Loader(
            dataset(wide), world, batch_size=BATCH, micro_batches=micro_batches, seed=SEED
        )

    def losses(self, epochs: int = 2) -> list[float]:
        return [result.loss for result in [self.step(batch) for batch in self.loader.epochs(epochs)]]


def by_hand(device: torch.device, dtype: torch.dtype) -> list[float]:
    """The losses of plain torch on the same device."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs, labels = dataset(wide)
    model = network().to(device, wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for epoch in range(2):
        order = shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES)
        for indices in torch.from_numpy(order).split(BATCH):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                output = model(inputs[indices].to(device))
                mean = F.cross_entropy(output, labels[indices].to(device))
            mean.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean.item())
    return losses
