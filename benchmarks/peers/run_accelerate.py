"""Accelerate: save_state with automatic names, load_state, skip_first_batches, a seedable sampler."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, PER_EPOCH, RANKS, Samples, StepRecord, build_model

project = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2)
data = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=data)
set_seed(0)
record = StepRecord()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Samples(), BATCH // RANKS, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


class Progress:
    """The number of steps, which save_state saves too."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if any(CHECKPOINTS.glob("checkpoint_*")):
    accelerator.load_state()
    project.iteration = progress.step // EVERY
for epoch in range(progress.step // PER_EPOCH, EPOCHS):
    loader.set_epoch(epoch)
    done = progress.step - epoch * PER_EPOCH
    batches = accelerator.skip_first_batches(loader, done) if done else loader
    for inputs, labels, indices in batches:
        record.begin(progress.step + 1, indices)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        progress.step += 1
        if progress.step % EVERY == 0:
            accelerator.save_state()
record.end(model)
accelerator.end_training()
