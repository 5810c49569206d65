"""Shoal, with dropout, BatchNorm, a ragged last batch and a random augmentation.

With the argument "layernorm", LayerNorm is in the place of BatchNorm over the whole batch, which takes
one micro-batch only.
"""

# mypy: ignore-errors

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import shoal


class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(21, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index, rng=None):
        x = self.inputs[index]
        return x + 0.1 * float(rng.normal()), x.sum(0, keepdim=True)


def loss(output, batch):
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


with shoal.init(seed=0) as world:
    norm = nn.LayerNorm(8) if "layernorm" in sys.argv else nn.BatchNorm1d(8)
    layers = nn.Linear(6, 8), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    model = shoal.parallelize(nn.Sequential(*layers), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(Points(), world, batch_size=8)
    with shoal.Run("run", step, loader) as run:
        run.restore()
        shoal.evaluate(step, Points())
        for batch in loader.epochs(4):
            step(batch)
            run.tick(every=2)
