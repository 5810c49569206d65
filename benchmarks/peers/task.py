"""The training that each library of `chaos_peers.py` runs, and the record of its steps and samples."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES = 110
BATCH = 20
"""Samples of a step on all ranks together; the last batch of an epoch has 10."""
RANKS = int(os.environ.get("STORM_RANKS", "2"))
EPOCHS = 8
PER_EPOCH = -(-SAMPLES // BATCH)
STEPS = EPOCHS * PER_EPOCH
EVERY = 4
"""Steps between checkpoints, which are also within epochs."""
CHECKPOINTS = Path("checkpoints")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Inputs, labels and indices."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(SAMPLES, 8, generator=generator)
        self._labels = (self._inputs[:, 0] > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[index], self._labels[index], index


class StepRecord:
    """Writes down the steps of this rank, and kills it in a step if that is due.

    STORM_KILLS and STORM_CONTROL are those of `kill_at_write.c`; STORM_PACE is the number of seconds
    that are added to each step. "step:1:7" is a kill of rank 1 in its step 7, counted from its start.
    With "term", `chaos_peers.py` sends SIGTERM to the command.
    """

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        self._control = Path(os.environ["STORM_CONTROL"])
        self._attempt = len(list(self._control.glob("killed-*")))
        kills = [*filter(None, os.environ.get("STORM_KILLS", "").split(","))]
        kind, rank, number = (*kills, "none:-1:-1")[min(self._attempt, len(kills))].split(":")
        here = kind in ("step", "term") and int(rank) == self._rank
        self._due, self._kills = (int(number) if here else -1), kind == "step"
        self._pace = float(os.environ["STORM_PACE"])
        self._taken = 0

    def begin(self, step: int, indices: Tensor) -> None:
        """Record a step, counted from 1 since the start of training, before its backward pass."""
        self._taken += 1
        line = json.dumps([self._attempt, step, time.time(), indices.tolist()])
        with (self._control / f"steps-{self._rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        if self._taken == self._due:
            (self._control / f"killed-{self._attempt}").touch()
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._pace)

    def end(self, model: nn.Module) -> None:
        """Record the final parameters."""
        if self._rank == 0:
            flat = torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])
            digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
            (self._control / "end.json").write_text(json.dumps([digest, flat.tolist()]))
