"""Accelerate, as its guide to checkpointing shows; "seedable" takes the sampler that has an epoch."""

# mypy: ignore-errors

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    options = DataLoaderConfiguration(use_seedable_sampler="seedable" in sys.argv)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    set_seed(0)
    inputs = torch.randn(24, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first, skip = 0, 0
    if os.path.exists("checkpoint"):
        accelerator.load_state("checkpoint")
        first, skip = json.loads(Path("checkpoint/position.json").read_text())
    for epoch in range(first, 4):
        if "no set_epoch" not in sys.argv:
            loader.set_epoch(epoch)
        done = skip if epoch == first else 0
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        for number, (x, y) in enumerate(batches, start=done + 1):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.save_state("next")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                Path("next/position.json").write_text(json.dumps([epoch, number]))
                shutil.rmtree("checkpoint", ignore_errors=True)
                os.replace("next", "checkpoint")
            accelerator.wait_for_everyone()


main()
