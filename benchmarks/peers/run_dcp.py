"""torchrun and torch.distributed.checkpoint, with torchdata's StatefulDataLoader.

As PyTorch's recipes of distributed checkpoints (AppState) and of fault-tolerant training with torchrun.
A directory without `.metadata` is an unfinished save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, RANKS, Samples, StepRecord, build_model


class AppState(Stateful):
    """All state of the training. Each rank has its own position in the data."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StatefulDataLoader
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.epoch = self.step = 0
        self._loader = f"loader-{dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        mine = {"loader": self.loader.state_dict(), "random": torch.get_rng_state()}
        return {
            "model": model,
            "optimizer": optimizer,
            "epoch": self.epoch,
            "step": self.step,
            self._loader: mine,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.epoch, self.step = state["epoch"], state["step"]
        self.loader.load_state_dict(state[self._loader]["loader"])
        torch.set_rng_state(state[self._loader]["random"])


def latest() -> Path | None:
    found = [path.parent for path in CHECKPOINTS.glob("step-*/.metadata")]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


dist.init_process_group("gloo")
record = StepRecord()
model = DistributedDataParallel(build_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = Samples()
sampler: DistributedSampler[Any] = DistributedSampler(data)
loader = StatefulDataLoader(data, BATCH // RANKS, sampler=sampler)
app = AppState(model, optimizer, loader)
if (path := latest()) is not None:
    state_dict_loader.load({"app": app}, checkpoint_id=path)
for epoch in range(app.epoch, EPOCHS):
    app.epoch = epoch
    sampler.set_epoch(epoch)
    for inputs, labels, indices in loader:
        record.begin(app.step + 1, indices)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        app.step += 1
        if app.step % EVERY == 0:
            state_dict_saver.save({"app": app}, checkpoint_id=CHECKPOINTS / f"step-{app.step}")
record.end(model)
dist.destroy_process_group()
