"""Classify random points; see docs/migration/accelerate.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(1200, 20)
labels = (inputs @ torch.randn(20, 5)).argmax(1)
training = TensorDataset(inputs[:960], labels[:960])
validation = TensorDataset(inputs[960:], labels[960:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

model = shoal.parallelize(model, world)
loader = shoal.Loader(training, world, batch_size=64, micro_batches=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
schedule = CosineAnnealingLR(optimizer, 10 * len(loader))
metrics = {"accuracy": shoal.Accuracy()}

for batch in loader.epochs(10):
    for x, y in batch:
        total, count = loss(model(x), (x, y))
        batch.backward(total=total, count=count)
    batch.finish(model, clip=1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if batch.ends_epoch:
        result = shoal.evaluate(
            model, validation, task=shoal.Task(loss), metrics=metrics
        )
        world.print(f"epoch {loader.epoch}: accuracy {result['accuracy']:.4f}")

shoal.export(model, "model.pt")
