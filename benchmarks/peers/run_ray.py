"""Ray Train: FailureConfig, and checkpoints by ray.train.report from rank 0, as its documentation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, PER_EPOCH, RANKS, Samples, StepRecord, build_model


def save(state: dict[str, Any]) -> None:
    """Report a checkpoint of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(directory, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": state["step"]}, checkpoint=checkpoint)


def train() -> None:
    ray.train.torch.enable_reproducibility(0)
    record = StepRecord()
    model: Any = ray.train.torch.prepare_model(build_model())
    # prepare_model wraps the model in DDP only if there are several workers.
    plain = getattr(model, "module", model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = ray.train.torch.prepare_data_loader(
        DataLoader(Samples(), BATCH // RANKS, shuffle=True)
    )
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for epoch in range(step // PER_EPOCH, EPOCHS):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        done = step - epoch * PER_EPOCH
        for number, (inputs, labels, indices) in enumerate(loader):
            if number < done:
                continue
            record.begin(step + 1, indices)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    record.end(model)


if __name__ == "__main__":
    ray.init(num_cpus=RANKS + 1, object_store_memory=100 << 20, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
        run_config=ray.train.RunConfig(
            name=str(CHECKPOINTS),
            storage_path=str(Path.cwd()),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
