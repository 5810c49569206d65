"""Trainings of the networks of `exact_models` in the cells of a table, and in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import shoal
from helpers.batch_norms import trained
from helpers.exact_models import EXAMPLES, build, dataset, loss
from helpers.reference import LEARNING_RATE, SEED, Trained

BATCH, GROUP, STEPS, UNTIL = 12, 4, 20, 7
"""Samples of a batch, and of a group of BatchNorm if there are several micro-batches; steps until the
end, and until the checkpoint of a run that is killed."""
UNITS = ("blocks.*",)


@dataclass(frozen=True)
class Way:
    """How a model is parallelized: the layout by the number of ranks, the strategies, the models."""

    layouts: Mapping[int, str]
    strategy: Callable[[], Any]
    models: tuple[str, ...] = tuple(EXAMPLES)


_ALL = dict.fromkeys((1, 2, 3, 4), "replicate=-1")
_SHARDED = {2: "shard=2", 3: "shard=3", 4: "replicate=2,shard=2"}
_RECOMPUTED = partial(shoal.ActivationCheckpointing, modules=UNITS)

WAYS = {
    "DDP": Way(_ALL, lambda: shoal.DDP(bucket_cap_mb=0.001)),
    "FSDP": Way(_SHARDED, lambda: shoal.FSDP(modules=UNITS)),
    "Recomputed, DDP": Way(_ALL, lambda: [_RECOMPUTED(), shoal.DDP()]),
    "Recomputed, FSDP": Way(_SHARDED, lambda: [_RECOMPUTED(), shoal.FSDP(modules=UNITS)]),
}


class Case(NamedTuple):
    """A cell. With `then`, a number of ranks, the run is killed and continues on them."""

    model: str
    way: str
    size: int
    micro_batches: int = 1
    samples: int = 29
    then: int = 0
    statistics: int | str = "batch"

    @property
    def layout(self) -> str:
        return WAYS[self.way].layouts[self.size]

    @property
    def specification(self) -> Case:
        """The same training on one process, in one micro-batch, with the same groups of BatchNorm."""
        return Case(self.model, "DDP", 1, samples=self.samples, statistics=self.statistics)


def cases() -> list[Case]:
    """All valid cells."""
    return [
        Case(model, name, size, micro_batches, samples, then, statistics)
        for name, way in WAYS.items()
        for model in way.models
        for size in way.layouts
        for micro_batches in EXAMPLES[model].micro_batches
        for statistics in (GROUP if EXAMPLES[model].normalizes and micro_batches > 1 else "batch",)
        for samples in (24, 29)
        for then in (0, *(other for other in (1, 2, 3) if other != size))
        if (name, size, micro_batches, then) != ("DDP", 1, 1, 0)  # the specification
    ]


class Parts(NamedTuple):
    """The parts of a training."""

    model: nn.Module
    step: shoal.Step
    loader: shoal.Loader


def parts(world: shoal.World, case: Case) -> Parts:
    """A new model, its step and its loader. After the kill, on other ranks, DDP continues."""
    strategy = WAYS[case.way].strategy()
    model = shoal.parallelize(build(case.model), world, strategy, statistics=case.statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(
        dataset(case.model, case.samples),
        world,
        batch_size=BATCH,
        micro_batches=case.micro_batches,
        seed=SEED,
    )
    return Parts(model, step, loader)


def train(world: shoal.World, case: Case, steps: int = STEPS) -> Trained:
    """The training without a run directory."""
    made, norms, losses = parts(world, case), [], []
    for batch in itertools.islice(made.loader.epochs(10_000), steps):
        result = made.step(batch)
        norms.append(result.norm)
        losses.append(result.loss)
    return trained(made.model, norms, losses)


class KilledError(Exception):
    """Ends a run between two checkpoints."""


def train_until_killed(world: shoal.World, case: Case, directory: str) -> Trained:
    """The training up to a checkpoint; two more steps are lost."""
    made, norms, losses = parts(world, case), [], []
    with suppress(KilledError), shoal.Run(directory, made.step, made.loader) as run:
        for batch in made.loader.epochs(10_000):
            result = made.step(batch)
            if made.step.number <= UNTIL:
                norms.append(result.norm)
                losses.append(result.loss)
            if made.step.number == UNTIL:
                run.save()
            if made.step.number == UNTIL + 2:
                raise KilledError
    return Trained({}, norms, losses)


def train_on(world: shoal.World, case: Case, directory: str, before: Trained) -> Trained:
    """The rest of the training of a killed run."""
    made, norms, losses = parts(world, case), [*before.norms], [*before.losses]
    with shoal.Run(directory, made.step, made.loader) as run:
        run.restore()
        for batch in made.loader.epochs(10_000):
            result = made.step(batch)
            norms.append(result.norm)
            losses.append(result.loss)
            if made.step.number == STEPS:
                break
    return trained(made.model, norms, losses)
