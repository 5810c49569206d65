"""Classify random points; see docs/migration/lightning.md."""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
fabric = lightning.Fabric(devices=devices, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

loader = DataLoader(data, 64 // devices, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for _ in range(10):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

if fabric.is_global_zero:
    torch.save(model.module.state_dict(), "model.pt")
