"""Shoal in Ray Train, as docs/clusters/ray.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer

import shoal
from shoal.ray import report
from task import BATCH, EPOCHS, EVERY, RANKS, Samples, StepRecord, build_model


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(config: dict[str, Any]) -> None:
    with shoal.init(seed=0) as world:
        record = StepRecord()
        model = shoal.parallelize(build_model(), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = shoal.Step(model, optimizer, shoal.Task(loss))
        loader = shoal.Loader(Samples(), world, batch_size=BATCH)
        with shoal.Run(config["run"], step, loader, keep=2) as run:
            run.restore()
            for batch in loader.epochs(EPOCHS):
                record.begin(step.number + 1, batch.micros[0].value[2])
                step(batch)
                run.tick()
                if run.step % EVERY == 0:
                    report(run, {"step": run.step})
        record.end(model)


if __name__ == "__main__":
    ray.init(num_cpus=RANKS + 1, object_store_memory=100 << 20, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"run": str(Path.cwd() / "run")},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
        run_config=ray.train.RunConfig(
            name="a",
            storage_path=str(Path.cwd()),
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    ).fit()
