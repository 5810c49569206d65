"""The script of a job whose model is not a script: its argument is the file with the options.

Its Run records the steps. It is in a separate directory, in which no file hides a module of the user
from imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.data import Loader
from shoal.distributed.init import init
from shoal.strategies import parallelize
from shoal.tools.bench.scaling.configurations import BuiltIn, Configuration, Factory, parse_subject
from shoal.tools.bench.scaling.models import make_model
from shoal.training.run import Run
from shoal.training.step import Step

LAYOUTS = {"fsdp": "shard=-1"}
RATE = 1e-4


def train_worker(path: str) -> None:
    """Train as the file describes. Collective."""
    given: Mapping[str, Any] = json.loads(Path(path).read_text())
    subject = parse_subject(given["model"])
    if not isinstance(subject, BuiltIn | Factory):
        raise ValueError(f"{subject} is a script, which is run directly")
    chosen = Configuration(**given["configuration"])
    with init(
        layout=LAYOUTS.get(chosen.strategy, "replicate=-1"),
        backend=chosen.backend if chosen.backend in ("gloo", "nccl", "mpi") else None,
        device="cpu" if chosen.backend == "mpi" else None,
        seed=0,
    ) as world:
        model, task, dataset, strategy = make_model(subject, chosen.batch)
        spread = parallelize(model, world, strategy)
        optimizer = torch.optim.AdamW(spread.parameters(), lr=RATE)
        step = Step(
            spread,
            optimizer,
            task,
            precision=chosen.precision,
            compile=None if chosen.way == "eager" else chosen.way,
        )
        loader = Loader(dataset, world, batch_size=chosen.batch)
        with Run(given["run"], step, loader, trackers=()) as run:
            for batch in loader.epochs(10**9):
                step(batch)
                run.tick()
                if step.number >= given["steps"]:
                    break


if __name__ == "__main__":
    train_worker(sys.argv[1])
