"""Classify random points; see docs/migration/deepspeed.md."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

engine, optimizer, loader, schedule = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    training_data=data,
)
for epoch in range(10):
    loader.data_sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(engine.device), y.to(engine.device)
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("run")

if torch.distributed.get_rank() == 0:
    torch.save(engine.module.state_dict(), "model.pt")
