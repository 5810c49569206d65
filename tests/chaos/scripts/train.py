"""A small training that resumes; --defect keeps a value of it outside of the checkpoints.

Each rank appends the samples of each step to `samples-RANK.jsonl`: the attempt, the step, the
positions, the indices that the dataset gave, and the time.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp", choices=("ddp", "fsdp", "tensor", "pipeline", "local"))
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--exact", default="rounding")
parser.add_argument("--defect", action="store_true")
parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a collective")
parser.add_argument("--home", type=Path, default=Path(), help="the directory of all files")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that are added to each step")
parser.add_argument("--mtbf", type=float, help="seconds between failures: save by Young and Daly")
options = parser.parse_args()
options.home.mkdir(exist_ok=True)
os.chdir(options.home)

SAMPLES = 110
"""The last batch of an epoch has 10 samples, and the others have 20."""

LAYOUTS = {
    "ddp": "replicate=-1",
    "fsdp": "shard=-1",
    "tensor": "shard=-1,tensor=2",
    "pipeline": "replicate=-1,pipeline=2",
    "local": "replicate=-1",
}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that are read one by one, as in a worker."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._inputs[index], self._labels[index], index


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def record(attempt: int, number: int, rank: int, batch: shoal.Batch) -> None:
    indices = [index for micro in batch.micros if micro.weight for index in micro.value[2].tolist()]
    line = json.dumps([attempt, number, batch.ranges, indices, time.time()])
    with open(f"samples-{rank}.jsonl", "a", buffering=1) as file:
        file.write(line + "\n")


STRATEGIES: dict[str, Any] = {
    "ddp": shoal.DDP(),
    "fsdp": shoal.FSDP(),
    "tensor": [shoal.TensorParallel(plan={"0": "column", "3": "row"}), shoal.FSDP()],
    "tensor alone": shoal.TensorParallel(plan={"0": "column", "3": "row"}),
    "pipeline": shoal.Pipeline(split_points=("3",)),
    "local": shoal.LocalSGD(sync_every=2),
}


torch.set_default_dtype(torch.float64)
layout = LAYOUTS[options.strategy]
with shoal.init(seed=0, exact=options.exact, layout=layout, timeout=options.timeout) as world:
    torch.set_num_threads(1)  # the number of threads changes the bits
    inputs = torch.randn(SAMPLES, 8)
    labels = (inputs[:, 0] > 0).long()
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    alone = " alone" * (options.strategy == "tensor" and world.size == 2)  # nothing to shard
    model = shoal.parallelize(nn.Sequential(*layers), world, STRATEGIES[options.strategy + alone])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = Samples(inputs, labels) if options.workers else (inputs, labels, torch.arange(SAMPLES))
    micro_batches = 2 if options.strategy == "pipeline" else 1
    loader = shoal.Loader(
        data, world, batch_size=20, micro_batches=micro_batches, num_workers=options.workers
    )
    every = 2 if options.mtbf is None else shoal.YoungDaly(mtbf=timedelta(seconds=options.mtbf))
    seen = Path("seen")
    with shoal.Run("runs/a", step, loader, keep=2) as run:
        run.restore()
        for batch in loader.epochs(options.epochs):
            if options.defect:
                taken = int(seen.read_text()) if seen.exists() else 0
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + taken)
                world.broadcast(None)
                if world.is_rank_zero:
                    seen.write_text(str(taken + 1))
            step(batch)
            record(run.files.fence.number, step.number, world.rank, batch)
            time.sleep(options.pace)
            run.tick(every=every)
        run.save()
