"""Lightning Fabric: fabric.save and fabric.load with all state in one dict, as its documentation."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, PER_EPOCH, RANKS, Samples, StepRecord, build_model

fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
record = StepRecord()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader: Any = fabric.setup_dataloaders(DataLoader(Samples(), BATCH // RANKS, shuffle=True))
model, optimizer = fabric.setup(model, optimizer)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
found = sorted(CHECKPOINTS.glob("step-*.ckpt"), key=lambda path: int(path.stem.removeprefix("step-")))
if found:
    fabric.load(found[-1], state)
for epoch in range(state["step"] // PER_EPOCH, EPOCHS):
    loader.sampler.set_epoch(epoch)
    done = state["step"] - epoch * PER_EPOCH
    for number, (inputs, labels, indices) in enumerate(loader):
        if number < done:
            continue
        record.begin(state["step"] + 1, indices)
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        state["step"] += 1
        if state["step"] % EVERY == 0:
            fabric.save(Path(CHECKPOINTS, f"step-{state['step']}.ckpt"), state)
record.end(model)
