"""A small training with all that a kill could lose, and ways to kill it at a moment of one's choice."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from helpers.kill_in_save import HookedFiles
from shoal.checkpoint import AnyPath, Checkpoints, async_save
from shoal.distributed.seeds import random_state
from shoal.strategies import engine_of
from shoal.strategies.data_parallel.ddp import DDPReducer
from shoal.strategies.engine import ReducerEngine

SAMPLES = 41
BATCH = 12  # the last batch of an epoch has 5 samples
EPOCH_STEPS = 4
EPOCHS = 5
STEPS = EPOCH_STEPS * EPOCHS
LEARNING_RATE = 1e-2


class Fuse:
    """Counts moments, and kills this process at number `length`."""

    def __init__(self, length: int | None) -> None:
        self._length = length
        self.burnt = 0

    def __call__(self, *_: object) -> None:
        if self.burnt == self._length:
            os.kill(os.getpid(), signal.SIGKILL)
        self.burnt += 1


class SaveFiles(HookedFiles):
    """Lists the operations on files since the restore, and kills this process at number `last`."""

    def __init__(self, last: int | None, death: Path) -> None:
        super().__init__()
        self._last = last
        self._death = death
        self.restored = False
        self.done: list[str] = []

    def at(self, number: int, path: AnyPath | None) -> None:
        if not self.restored:
            return
        name = "" if path is None else path.name.rstrip("0123456789")
        self.done.append(f"{self.names[number]} {name}")
        if len(self.done) - 1 == self._last:
            self._death.write_text(self.done[-1])
            os.kill(os.getpid(), signal.SIGKILL)


class Indexed(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples that know their index."""

    def __init__(self, fuse: Fuse) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self._targets = torch.randint(0, 3, (SAMPLES,), generator=generator)
        self._fuse = fuse

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        self._fuse()
        return self._inputs[index], self._targets[index], index


@dataclass(frozen=True, kw_only=True)
class Training:
    """One attempt. Rank `victim` dies at an operation of its first save, or at a moment elsewhere."""

    directory: Path
    epochs: int = EPOCHS
    noise: float = 0.3
    micro_batches: int = 2
    every: int = 1
    keep: int = 1
    victim: int = -1
    operation: int | None = None
    moment: int | None = None
    waits: bool = True
    """For each save, so that what was saved before a moment is certain."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a training came to on one rank; `operations` are those of the save of step 3."""

    restored: int | None
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Any]
    operations: list[str]
    moments: int


def build(dropout: float) -> nn.Module:
    drop = nn.Dropout(dropout)
    layers = (nn.Linear(6, 16), nn.Tanh(), drop, nn.Linear(16, 16), nn.Tanh(), drop, nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


def parallel(world: shoal.World, dropout: float) -> nn.Module:
    return shoal.parallelize(build(dropout), world, shoal.DDP(bucket_cap_mb=0.0005))


def buckets(world: shoal.World) -> int:
    """How many buckets the gradients are reduced in."""
    engine = engine_of(parallel(world, 0.3))
    assert isinstance(engine, ReducerEngine)
    assert isinstance(engine.reducer, DDPReducer)
    return len(engine.reducer._reducer._reducer._get_zeros_like_grad_buckets())


def inputs(noise: float, batch: Any) -> Tensor:
    """With noise from the global generators that torch does not know; without it if `noise` is 0."""
    samples: Tensor = batch[0]
    return samples * (1 + noise * (random.random() + np.random.rand())) if noise else samples


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(world: shoal.World, training: Training) -> Ended:
    """The training function: the same the first time and after every kill."""
    async_save.BLOCK = 500  # bytes, so that a file takes several writes
    directory = training.directory
    dies = world.rank == training.victim
    fuse = Fuse(training.moment if dies else None)
    files = SaveFiles(training.operation if dies else None, directory / "death")
    model = parallel(world, training.noise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    light(fuse, model, optimizer)
    task = shoal.Task(loss, inputs=partial(inputs, training.noise))
    step = shoal.Step(model, optimizer, task, clip=1.0)
    data = shoal.Loader(Indexed(fuse), world, batch_size=BATCH, micro_batches=training.micro_batches)
    operations: list[str] = []
    with shoal.Run(directory, step, data, keep=training.keep) as run:
        run.files.checkpoints = Checkpoints(
            directory / "checkpoints", world, keep=training.keep, files=files
        )
        restored = run.restore()
        files.restored = True
        for batch in data.epochs(training.epochs):
            begun = len(files.done)
            step(batch)
            note(directory, world.rank, step.number, batch)
            fuse()
            run.tick(every=training.every)
            fuse()
            if training.waits:
                run.files.checkpoints.background.wait()
            operations = files.done[begun:] if step.number == 3 else operations
        run.save()
    return Ended(
        restored=None if restored is None else restored.step,
        model={name: tensor.clone() for name, tensor in model.state_dict().items()},
        optimizer=optimizer.state_dict(),
        random=random_state(),
        operations=operations,
        moments=fuse.burnt,
    )


def light(fuse: Fuse, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the fuse burn at moments within a restore, forward, backward and update."""
    model.register_load_state_dict_pre_hook(fuse)
    model.register_forward_pre_hook(fuse)
    for parameter in model.parameters():
        parameter.register_hook(fuse)
    optimizer.register_step_pre_hook(fuse)
    optimizer.register_step_post_hook(fuse)


def note(directory: Path, rank: int, step: int, batch: shoal.Batch) -> None:
    """Write down which samples the dataset really gave to this rank for a step."""
    indices = [i for micro in batch.micros if micro.weight for i in micro.value[2].tolist()]
    with (directory / f"seen-{rank}.jsonl").open("a") as file:
        file.write(json.dumps([step, indices]) + "\n")


def samples(directory: Path, rank: int) -> dict[int, list[int]]:
    """The indices that `note` wrote down last for each step."""
    lines = (directory / f"seen-{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, through dicts, lists and tuples."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(np.array_equal(left, right))
