"""Fabric, as its guides show."""

# mypy: ignore-errors

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(24, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists("checkpoint.ckpt"):
        fabric.load("checkpoint.ckpt", state)
    for epoch in range(state["epoch"], 4):
        for x, y in loader:
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] = epoch + 1
        fabric.save("next.ckpt", state)
        if fabric.is_global_zero:
            os.replace("next.ckpt", "checkpoint.ckpt")
        fabric.barrier()


main()
