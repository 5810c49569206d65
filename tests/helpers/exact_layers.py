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


_SPECIAL = ("Even GPT", "Untied GPT", "Shared")
"""The models of some strategies only."""


@dataclass(frozen=True)
class Way:
    """How a model is parallelized: the layout by the number of ranks, the strategies, the models."""

    layouts: Mapping[int, str]
    strategy: Callable[[str], Any]
    models: tuple[str, ...] = tuple(name for name in EXAMPLES if name not in _SPECIAL)
    micro_batches: tuple[int, ...] = ()
    """Those that a schedule allows; empty for those of the model."""


_ALL = dict.fromkeys((1, 2, 3, 4), "replicate=-1")
_SHARDED = {2: "shard=2", 3: "shard=3", 4: "replicate=2,shard=2"}
_CONTEXT = {2: "context=2", 4: "replicate=2,context=2"}
_RECOMPUTED = partial(shoal.ActivationCheckpointing, modules=UNITS)
_SLICED = shoal.ContextParallel(modules=UNITS)

PLANS = {
    "GPT": {
        "blocks.*.attention.qkv": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.wide": "column",
        "blocks.*.narrow": "row",
    },
    "ViT": {"blocks.*.mlp.0": "column", "blocks.*.mlp.3": "row"},
}
"""Dropout draws for the heads of a rank in attention, and for its features in a feed-forward."""
STAGES = {
    "GPT": ("blocks.0", "blocks.1", "norm"),
    "ViT": ("blocks.0", "blocks.1", "norm"),
    "Shared": ("blocks.1", "blocks.2", "blocks.3"),
    "UNet": ("blocks.1", "up", "head"),
}
"""The first modules of the stages after the first, if there are four."""
SEQUENCE = {
    **PLANS["GPT"],
    **{"words": "vocabulary", "head": "head", "places": "sequence", "drop": "sequence"},
    **{f"blocks.*.{name}": "sequence" for name in ("before", "between", "drop", "attention.last")},
    "norm": "sequence",
}


def _tensor(model: str) -> shoal.TensorParallel:
    return shoal.TensorParallel(plan=PLANS[model.removeprefix("Untied ")])


_STAGED = ("Untied GPT", "ViT", "Shared", "UNet")
"""Tied layers have to be on one rank."""


def _pipeline(schedule: str, stages: int, model: str) -> shoal.Pipeline:
    points = STAGES[model.removeprefix("Untied ")]
    chosen = points[1:2] if stages == 2 else points[: stages - 1]
    return shoal.Pipeline(split_points=chosen, schedule=schedule)


def _staged(schedule: str, stages: int = 2, ranks: int = 2, micro_batches: tuple[int, ...] = ()) -> Way:
    folded = ("GPT",) if schedule in ("zbv", "dualpipev") else ()
    layouts = {ranks: f"pipeline={ranks}"}
    return Way(layouts, partial(_pipeline, schedule, stages), _STAGED + folded, micro_batches)


_CALLED = {
    "Untied GPT": (("words", "places", "blocks.0"), ("blocks.1", "norm", "head")),
    "ViT": (("stem", "blocks.0"), ("blocks.1", "norm", "head")),
    "Shared": (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "last")),
}


def _rpc(model: str) -> shoal.RPCPipeline:
    front, back = _CALLED[model]
    return shoal.RPCPipeline(stages={"front": front, "back": back})


_1F1B = partial(_pipeline, "1f1b", 2)
PIPELINES = {
    "Pipeline": Way({2: "pipeline=2", 4: "replicate=2,pipeline=2"}, _1F1B, _STAGED, (3,)),
    "GPipe": _staged("gpipe"),
    "Interleaved": _staged("interleaved", 4),
    "Looped": _staged("looped", 4),
    "Zero-bubble": _staged("zero-bubble", 4),
    "ZBV": _staged("zbv", 4),
    "DualPipeV": _staged("dualpipev", 4, 2, (4,)),
    "Pipeline of 3": _staged("1f1b", 3, 3, (3,)),
    "Pipeline of 4": _staged("1f1b", 4, 4, (4,)),
    "Recomputed, Pipeline": Way({2: "pipeline=2"}, lambda m: [_RECOMPUTED(), _1F1B(m)], _STAGED, (3,)),
    "Recomputed, Interleaved, FSDP": Way(
        {4: "shard=2,pipeline=2"},
        lambda m: [_RECOMPUTED(), _pipeline("interleaved", 4, m)],
        _STAGED,
    ),
    "Pipeline, FSDP": Way({4: "shard=2,pipeline=2"}, _1F1B, _STAGED, (3,)),
    "Tensor, Pipeline": Way(
        {4: "pipeline=2,tensor=2"}, lambda m: [_tensor(m), _1F1B(m)], ("Untied GPT", "ViT"), (3,)
    ),
    "RPC": Way({2: "pipeline=2"}, _rpc, tuple(_CALLED)),
}
WAYS = PIPELINES | {
    "DDP": Way(_ALL, lambda _: shoal.DDP(bucket_cap_mb=0.001)),
    "FSDP": Way(_SHARDED, lambda _: shoal.FSDP(modules=UNITS)),
    "Recomputed, DDP": Way(_ALL, lambda _: [_RECOMPUTED(), shoal.DDP()]),
    "Recomputed, FSDP": Way(_SHARDED, lambda _: [_RECOMPUTED(), shoal.FSDP(modules=UNITS)]),
    "Tensor": Way({2: "tensor=2", 4: "replicate=2,tensor=2"}, _tensor, tuple(PLANS)),
    "Tensor, FSDP": Way(
        {4: "shard=2,tensor=2"}, lambda m: [_tensor(m), shoal.FSDP(modules=UNITS)], tuple(PLANS)
    ),
    "Recomputed, Tensor": Way({2: "tensor=2"}, lambda m: [_RECOMPUTED(), _tensor(m)], tuple(PLANS)),
    "Recomputed, Tensor, FSDP": Way(
        {4: "shard=2,tensor=2"},
        lambda m: [_RECOMPUTED(), _tensor(m), shoal.FSDP(modules=UNITS)],
        tuple(PLANS),
    ),
    "Context": Way(_CONTEXT, lambda _: _SLICED, ("Even GPT", "ViT")),
    "Context, FSDP": Way(
        {2: "context=2", 4: "shard=2,context=2"},
        lambda _: [_SLICED, shoal.FSDP(modules=UNITS)],
        ("Even GPT", "ViT"),
    ),
    "Recomputed, Context": Way(_CONTEXT, lambda _: [_RECOMPUTED(), _SLICED], ("Even GPT",)),
    "Recomputed, Context, FSDP": Way(
        {4: "shard=2,context=2"},
        lambda _: [_RECOMPUTED(), _SLICED, shoal.FSDP(modules=UNITS)],
        ("Even GPT",),
    ),
    "Context, Tensor": Way(
        {4: "context=2,tensor=2"}, lambda _: [_SLICED, _tensor("GPT")], ("Even GPT",)
    ),
    "Recomputed, Context, Tensor": Way(
        {4: "context=2,tensor=2"}, lambda _: [_RECOMPUTED(), _SLICED, _tensor("GPT")], ("Even GPT",)
    ),
    "Sequence": Way({2: "tensor=2"}, lambda _: shoal.TensorParallel(plan=SEQUENCE), ("GPT",)),
    "Recomputed, Sequence, FSDP": Way(
        {4: "shard=2,tensor=2"},
        lambda _: [_RECOMPUTED(), shoal.TensorParallel(plan=SEQUENCE), shoal.FSDP(modules=UNITS)],
        ("GPT",),
    ),
}


class Case(NamedTuple):
    """A cell. With `then`, a number of ranks, the run is killed and continues on them.

    `compile` is that of the Step; the specification is not compiled.
    """

    model: str
    way: str
    size: int
    micro_batches: int = 1
    samples: int = 29
    then: int = 0
    statistics: int | str = "batch"
    compile: str | None = None

    @property
    def layout(self) -> str:
        return WAYS[self.way].layouts[self.size]

    @property
    def specification(self) -> Case:
        """The same training on one process, in one micro-batch, with the same groups of BatchNorm."""
        return Case(self.model, "DDP", 1, samples=self.samples, statistics=self.statistics)


COMPILED = [
    *(
        Case("GPT", "DDP", size, micro_batches, compile="inductor")
        for size in (1, 2)
        for micro_batches in (1, 3)
    ),
    Case("GPT", "FSDP", 2, 3, compile="inductor"),
    Case("GPT", "DDP", 1, 3, compile="blocks"),
    Case("GPT", "DDP", 2, 3, compile="blocks"),
    Case("GPT", "Recomputed, DDP", 2, 1, then=1, compile="blocks"),
    Case("Contrastive", "DDP", 2, 1, then=1, compile="inductor"),
]
"""Each takes half a minute or more, for the compiler."""


def cases() -> list[Case]:
    """All valid cells."""
    return [
        Case(model, name, size, micro_batches, samples, then, statistics)
        for name, way in WAYS.items()
        for model in way.models
        for size in way.layouts
        for micro_batches in way.micro_batches or EXAMPLES[model].micro_batches
        for statistics in (GROUP if EXAMPLES[model].normalizes and micro_batches > 1 else "batch",)
        for samples in (24, 29)
        for then in (0, *(other for other in (1, 2, 3) if other != size))
        if (name, size, micro_batches, then) != ("DDP", 1, 1, 0)  # the specification
    ] + COMPILED


class Parts(NamedTuple):
    """The parts of a training."""

    model: nn.Module
    step: shoal.Step
    loader: shoal.Loader


def parts(world: shoal.World, case: Case) -> Parts:
    """A new model, its step and its loader. After the kill, on other ranks, DDP continues."""
    strategy = WAYS[case.way].strategy(case.model)
    model = shoal.parallelize(build(case.model), world, strategy, statistics=case.statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0, compile=case.compile)
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
