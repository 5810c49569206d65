"""The table of ways to spread a model, and how each is held against one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import shoal
from helpers.ranks import Ranks
from helpers.reference import (
    BATCH,
    CUT,
    LEARNING_RATE,
    PLAN,
    TOLERANCE,
    UNITS,
    Row,
    Trained,
    distance,
    specification,
    train,
)

STEPS = 10
HALF = 0.04
"""How far ten steps in bf16, with 8 bits of mantissa, stray from those in fp64 by the same measure."""

SMALL = STEPS * LEARNING_RATE / HALF
"""Parameters of less are measured by this, so that they may differ by what ten steps of AdamW move:
biases begin as zeros, and where their gradients are small it follows what rounding leaves of these."""


Strategy = Callable[[str], Any]
"""Of a model by its name."""


class Way(NamedTuple):
    strategy: Strategy
    layouts: tuple[str, ...]
    models: tuple[str, ...] = ("convolutional", "transformer")
    micro_batches: tuple[int, ...] = (1, 4)


CONVOLUTIONAL, TRANSFORMER = ("convolutional",), ("transformer",)
NORMS = {"block.norm1": "sequence", "block.norm2": "sequence"}
LOGITS = PLAN | {"head": "logits"}


def cut(schedule: str = "1f1b", *points: str) -> Strategy:
    return lambda model: shoal.Pipeline(split_points=points or CUT[model], schedule=schedule)


def remote(workers: dict[str, tuple[int, ...]] | None = None, **stages: tuple[str, ...]) -> Strategy:
    stages = stages or {"front": ("features",), "back": ("head",)}
    return lambda _: shoal.RPCPipeline(stages=stages, workers=workers)


def tensor(plan: dict[str, str] = PLAN) -> Strategy:
    return lambda _: shoal.TensorParallel(plan=plan)


def all_of(*strategies: Strategy) -> Strategy:
    return lambda model: [strategy(model) for strategy in strategies]


def ddp(_: str) -> Any:
    return shoal.DDP(bucket_cap_mb=0.001)


def fsdp(model: str) -> Any:
    return shoal.FSDP(modules=UNITS[model])


def zero2(model: str) -> Any:
    return shoal.FSDP(modules=UNITS[model], reshard_after_forward=False, accumulate="whole")


def block(_: str) -> Any:
    return shoal.FSDP(modules=("block",))


def context(model: str) -> Any:
    return shoal.ContextParallel(modules=UNITS[model])


def recomputed(model: str) -> Any:
    return shoal.ActivationCheckpointing(modules=UNITS[model])


def keeping(model: str) -> Any:
    return shoal.ActivationCheckpointing(modules=UNITS[model], save=("products", "attention"))


def placed(_: str) -> Any:
    """The rank's device, taken for two: hooks and order are tried, and moves elsewhere."""
    return shoal.DevicePlacement((0, 0), in_flight=2)


TWO, FOUR = "pipeline=2", "replicate=2,pipeline=2"
WIDE = {"block.linear1": "column", "block.linear2": "row"}
WAYS = {
    "GPipe": Way(cut("gpipe", "head"), (TWO, FOUR), CONVOLUTIONAL),
    "1F1B": Way(cut("1f1b", "features.1", "head"), ("pipeline=3",), CONVOLUTIONAL, (4,)),
    "1F1B, FSDP": Way(cut("1f1b", "head"), ("shard=2,pipeline=2",), CONVOLUTIONAL, (4,)),
    "Interleaved": Way(
        cut("interleaved"), (TWO, "shard=2,pipeline=2", "replicate=4,pipeline=2"), CONVOLUTIONAL
    ),
    "Looped": Way(cut("looped"), (TWO,), CONVOLUTIONAL),
    "Zero bubble": Way(
        cut("zero-bubble"), (TWO, FOUR, "replicate=2,shard=2,pipeline=2"), CONVOLUTIONAL
    ),
    "ZBV": Way(cut("zbv"), (TWO, FOUR)),
    "ZBV, FSDP": Way(cut("zbv"), ("shard=2,pipeline=2",), CONVOLUTIONAL),
    "DualPipeV": Way(cut("dualpipev"), (TWO, FOUR), micro_batches=(4,)),
    "RPCPipeline": Way(remote(), (TWO, FOUR), CONVOLUTIONAL),
    "RPCPipeline, 3 stages": Way(
        remote(a=("features.0",), b=("features.1", "features.2"), c=("head",)),
        ("pipeline=3",),
        CONVOLUTIONAL,
    ),
    "RPCPipeline, a stage on two ranks": Way(
        remote({"front": (0, 2), "back": (1,)}), ("pipeline=3",), CONVOLUTIONAL
    ),
    "RPCPipeline, both on two ranks": Way(
        remote({"front": (0, 1), "back": (2, 3)}), ("pipeline=4",), CONVOLUTIONAL
    ),
    "Tensor, ZBV": Way(
        all_of(tensor(WIDE), cut("zbv")),
        ("tensor=2,pipeline=2", "replicate=2,tensor=2,pipeline=2"),
        TRANSFORMER,
    ),
    "ActivationCheckpointing, GPipe": Way(
        all_of(recomputed, cut("gpipe", "head")), (TWO,), CONVOLUTIONAL
    ),
    "ActivationCheckpointing, DDP": Way(all_of(recomputed, ddp), ("replicate=3",)),
    "ActivationCheckpointing, FSDP": Way(all_of(recomputed, fsdp), ("shard=2",)),
    "ActivationCheckpointing, Tensor, FSDP": Way(
        all_of(recomputed, tensor(), fsdp), ("shard=2,tensor=2",), TRANSFORMER
    ),
    "TensorParallel": Way(tensor(), ("tensor=2", "tensor=4", "replicate=2,tensor=2"), TRANSFORMER),
    "Tensor, FSDP": Way(
        all_of(tensor(), block),
        ("shard=2,tensor=2", "shard=3,tensor=2", "replicate=2,shard=2,tensor=2"),
        TRANSFORMER,
    ),
    "ContextParallel": Way(context, ("context=2", "replicate=2,context=2"), TRANSFORMER),
    "ActivationCheckpointing, ContextParallel, FSDP": Way(
        all_of(recomputed, context, fsdp), ("shard=2,context=2",), TRANSFORMER
    ),
    "ContextParallel, TensorParallel": Way(
        all_of(context, tensor()), ("context=2,tensor=2", "replicate=2,context=2,tensor=2"), TRANSFORMER
    ),
    "Tensor sequence and logits": Way(
        tensor(LOGITS | NORMS), ("tensor=2", "replicate=2,tensor=2"), TRANSFORMER
    ),
    "Tensor sequence": Way(tensor(PLAN | NORMS), ("tensor=4",), TRANSFORMER),
    "Tensor logits, FSDP": Way(all_of(tensor(LOGITS), block), ("shard=2,tensor=2",), TRANSFORMER),
    "ActivationCheckpointing some, Tensor sequence, FSDP": Way(
        all_of(keeping, tensor(PLAN | NORMS), block), ("shard=2,tensor=2",), TRANSFORMER
    ),
    "ActivationCheckpointing some, DDP": Way(all_of(keeping, ddp), ("replicate=4",)),
    "ActivationCheckpointing some, FSDP": Way(all_of(keeping, fsdp), ("shard=4",)),
    "DevicePlacement, DDP": Way(all_of(placed, ddp), ("replicate=2", "replicate=3")),
    "DDP": Way(ddp, ("replicate=2", "replicate=3", "replicate=4")),
    "ZeRO-3": Way(fsdp, ("shard=1", "shard=2", "shard=3", "shard=4")),
    "ZeRO-2": Way(zero2, ("shard=2", "shard=3")),
    "HSDP": Way(fsdp, ("replicate=2,shard=2", "replicate=4,shard=2")),
}

BATCHES = [  # model, tokens, samples, clip
    ("convolutional", False, 96, None),
    ("convolutional", False, 101, 0.5),
    ("transformer", False, 96, 0.5),
    ("transformer", True, 101, None),
    ("transformer", True, 3, 0.5),
]


class Case(NamedTuple):
    way: str
    layout: str
    batch: int
    micro_batches: int
    precision: str

    @property
    def size(self) -> int:
        return math.prod(int(part.partition("=")[2]) for part in self.layout.split(","))

    @property
    def row(self) -> Row:
        model, tokens, samples, clip = BATCHES[self.batch]
        raw = self.precision == "fp32" and (self.size + self.batch) % 2 == 1
        raw = raw and "pipeline" not in self.layout  # which owns the backward pass
        return Row(model, samples, tokens, self.micro_batches, raw, clip)


ALL = [
    Case(name, layout, *rest)
    for name, way in WAYS.items()
    for layout in way.layouts
    for rest in itertools.product(range(len(BATCHES)), way.micro_batches, ("fp32", "bf16"))
    if BATCHES[rest[0]][0] in way.models
]
# A batch has a sample for each micro-batch of each rank; eight processes wait for each other at length.
CASES = [
    case
    for case in ALL
    if case.size * case.micro_batches <= BATCH
    and (case.size < 8 or (case.precision, case.micro_batches) == ("fp32", 1))
]


@functools.cache
def expected(row: Row) -> Trained:
    return specification(row, STEPS)


def check(ranks: Ranks, case: Case) -> None:
    """Raises AssertionError where the ranks don't end like one process."""
    strategy = WAYS[case.way].strategy(case.row.model)
    one = dataclasses.replace(case.row, micro_batches=1, raw=False)
    results = ranks.call(train, case.row, "", strategy, STEPS, case.precision)
    together = {name: value for result in results for name, value in result.parameters.items()}
    for result in results:
        result.parameters = together | result.parameters  # of a pipeline a rank has its stages
        if case.precision == "fp32":
            assert distance(result, expected(one)) < TOLERANCE
        else:
            assert distance(result, expected(one), SMALL) < HALF
