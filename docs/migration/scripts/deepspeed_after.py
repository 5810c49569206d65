"""Classify random points; see docs/migration/deepspeed.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


world = shoal.init(layout="shard=-1")
torch.manual_seed(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

zero_2 = shoal.FSDP(reshard_after_forward=False)
model = shoal.parallelize(model, world, zero_2)
loader = shoal.Loader(data, world, batch_size=64, micro_batches=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
warmup_decay = shoal.LRSchedule(decay="linear", warmup_steps=15)
schedule = warmup_decay(optimizer, 150)
task = shoal.Task(loss)
step = shoal.Step(model, optimizer, task, clip=1.0, schedule=schedule)
with shoal.Run("run", step, loader) as run:
    run.restore()
    for batch in loader.epochs(10):
        step(batch)
        run.tick(every=15)
    run.save()

shoal.export(model, "model.pt")
