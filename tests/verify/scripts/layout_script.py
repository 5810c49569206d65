"""Shoal with the layout that sys.argv[1] names, on any number of ranks."""

# mypy: ignore-errors

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import shoal

KIND, SIZE = sys.argv[1], int(os.environ["WORLD_SIZE"])
STRATEGIES = {
    "shard": lambda: shoal.FSDP(),
    "tensor": lambda: shoal.TensorParallel(plan={"0": "column", "2": "row"}),
    "pipeline": lambda: shoal.Pipeline(split_points=["2"]),
    "expert": lambda: shoal.ExpertParallel(),
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, hidden, index, weights):
        result = torch.zeros_like(hidden)
        for expert in range(len(self.weight)):
            token, choice = torch.where(index == expert)
            output = F.linear(hidden[token], self.weight[expert]) * weights[token, choice, None]
            result = result.index_add(0, token, output)
        return result


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights)


def loss(output, batch):
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


with shoal.init(seed=0, layout=f"{KIND}=2,replicate=-1" if SIZE > 1 else "replicate=-1") as world:
    middle = Mixture() if KIND == "expert" else nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), middle, nn.ReLU(), nn.Linear(8, 1))
    with_strategy = SIZE > 1 or KIND == "expert"
    model = shoal.parallelize(model, world, STRATEGIES[KIND]() if with_strategy else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    dataset = inputs, inputs.sum(1, keepdim=True)
    loader = shoal.Loader(dataset, world, batch_size=8, micro_batches=2)
    with shoal.Run("run", step, loader) as run:
        run.restore()
        for batch in loader.epochs(4):
            step(batch)
            run.tick(every=2)
