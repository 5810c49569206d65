"""FSDP2 with distributed checkpoints, as torch's tutorials show.

With the argument "sum", the loss is the sum over the samples of a rank. FSDP averages over the
ranks, so the gradient depends on their number.
"""

# mypy: ignore-errors

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def collect(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(24, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists("position.json"):
        first = json.loads(Path("position.json").read_text())
        state = collect(model, optimizer)
        dcp.load(state, checkpoint_id=f"checkpoint-{first}")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            reduction = "sum" if "sum" in sys.argv else "mean"
            nn.functional.mse_loss(model(x), y, reduction=reduction).backward()
            optimizer.step()
            optimizer.zero_grad()
        dcp.save(collect(model, optimizer), checkpoint_id=f"checkpoint-{epoch + 1}")
        if dist.get_rank() == 0:
            Path("next.json").write_text(json.dumps(epoch + 1))
            os.replace("next.json", "position.json")
        dist.barrier()
    dist.destroy_process_group()


main()
