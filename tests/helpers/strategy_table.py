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


class Way(NamedTuple):
    strategy: Callable[[str], Any]
    layouts: tuple[str, ...]
    models: tuple[str, ...] = ("convolutional", "transformer")
    micro_batches: tuple[int, ...] = (1, 4)


NORMS = {"block.norm1": "sequence", "block.norm2": "sequence"}
LOGITS = PLAN | {"head": "logits"}
KEEPING = {
    model: shoal.ActivationCheckpointing(modules=units, save=("products", "attention"))
    for model, units in UNITS.items()
}


def folded(schedule: str) -> Callable[[str], Any]:
    return lambda model: shoal.Pipeline(split_points=CUT[model], schedule=schedule)


WAYS = {
    "GPipe": Way(
        lambda model: shoal.Pipeline(split_points=("head",), schedule="gpipe"),
        ("pipeline=2", "replicate=2,pipeline=2"),
        ("convolutional",),
    ),
    "1F1B": Way(
        lambda model: shoal.Pipeline(split_points=("features.1", "head")),
        ("pipeline=3",),
        ("convolutional",),
        micro_batches=(4,),
    ),
    "1F1B, FSDP": Way(
        lambda model: shoal.Pipeline(split_points=("head",)),
        ("shard=2,pipeline=2",),
        ("convolutional",),
        micro_batches=(4,),
    ),
    "Interleaved": Way(
        lambda model: shoal.Pipeline(split_points=CUT[model], schedule="interleaved"),
        ("pipeline=2", "shard=2,pipeline=2", "replicate=4,pipeline=2"),
        ("convolutional",),
    ),
    "Looped": Way(
        lambda model: shoal.Pipeline(split_points=CUT[model], schedule="looped"),
        ("pipeline=2",),
        ("convolutional",),
    ),
    "Zero bubble": Way(
        lambda model: shoal.Pipeline(split_points=CUT[model], schedule="zero-bubble"),
        ("pipeline=2", "replicate=2,pipeline=2", "replicate=2,shard=2,pipeline=2"),
        ("convolutional",),
    ),
    "ZBV": Way(folded("zbv"), ("pipeline=2", "replicate=2,pipeline=2")),
    "ZBV, FSDP": Way(folded("zbv"), ("shard=2,pipeline=2",), ("convolutional",)),
    "DualPipeV": Way(folded("dualpipev"), ("pipeline=2", "replicate=2,pipeline=2"), micro_batches=(4,)),
    "RPCPipeline": Way(
        lambda model: shoal.RPCPipeline(stages={"front": ("features",), "back": ("head",)}),
        ("pipeline=2", "replicate=2,pipeline=2"),
        ("convolutional",),
    ),
    "RPCPipeline, 3 stages": Way(
        lambda model: shoal.RPCPipeline(
            stages={"a": ("features.0",), "b": ("features.1", "features.2"), "c": ("head",)}
        ),
        ("pipeline=3",),
        ("convolutional",),
    ),
    "RPCPipeline, a stage on two ranks": Way(
        lambda model: shoal.RPCPipeline(
            stages={"front": ("features",), "back": ("head",)},
            workers={"front": (0, 2), "back": (1,)},
        ),
        ("pipeline=3",),
        ("convolutional",),
    ),
    "RPCPipeline, both on two ranks": Way(
        lambda model: shoal.RPCPipeline(
            stages={"front": ("features",), "back": ("head",)},
            workers={"front": (0, 1), "back": (2, 3)},
        ),
        ("pipeline=4",),
        ("convolutional",),
    ),
    "Tensor, ZBV": Way(
        lambda model: [
            shoal.TensorParallel(plan={"block.linear1": "column", "block.linear2": "row"}),
            folded("zbv")(model),
        ],
        ("tensor=2,pipeline=2", "replicate=2,tensor=2,pipeline=2"),
        ("transformer",),
    ),
    "ActivationCheckpointing, GPipe": Way(
        lambda model: [
            shoal.ActivationCheckpointing(modules=UNITS[model]),
            shoal.Pipeline(split_points=("head",), schedule="gpipe"),
        ],
        ("pipeline=2",),
        ("convolutional",),
    ),
    "ActivationCheckpointing, DDP": Way(
        lambda model: [
            shoal.ActivationCheckpointing(modules=UNITS[model]),
            shoal.DDP(bucket_cap_mb=0.001),
        ],
        ("replicate=3",),
    ),
    "ActivationCheckpointing, FSDP": Way(
        lambda model: [
            shoal.ActivationCheckpointing(modules=UNITS[model]),
            shoal.FSDP(modules=UNITS[model]),
        ],
        ("shard=2",),
    ),
    "ActivationCheckpointing, Tensor, FSDP": Way(
        lambda model: [
            shoal.ActivationCheckpointing(modules=UNITS[model]),
            shoal.TensorParallel(plan=PLAN),
            shoal.FSDP(modules=UNITS[model]),
        ],
        ("shard=2,tensor=2",),
        ("transformer",),
    ),
    "TensorParallel": Way(
        lambda model: shoal.TensorParallel(plan=PLAN),
        ("tensor=2", "tensor=4", "replicate=2,tensor=2"),
        ("transformer",),
    ),
    "Tensor, FSDP": Way(
        lambda model: [shoal.TensorParallel(plan=PLAN), shoal.FSDP(modules=("block",))],
        ("shard=2,tensor=2", "shard=3,tensor=2", "replicate=2,shard=2,tensor=2"),
        ("transformer",),
    ),
    "ContextParallel": Way(
        lambda model: shoal.ContextParallel(modules=UNITS[model]),
        ("context=2", "replicate=2,context=2"),
        ("transformer",),
    ),
    "ActivationCheckpointing, ContextParallel, FSDP": Way(
        lambda model: [
            shoal.ActivationCheckpointing(modules=UNITS[model]),
            shoal.ContextParallel(modules=UNITS[model]),
            shoal.FSDP(modules=UNITS[model]),
        ],
        ("shard=2,context=2",),
        ("transformer",),
    ),
    "ContextParallel, TensorParallel": Way(
        lambda model: [shoal.ContextParallel(modules=UNITS[model]), shoal.TensorParallel(plan=PLAN)],
        ("context=2,tensor=2", "replicate=2,context=2,tensor=2"),
        ("transformer",),
    ),
    "Tensor sequence and logits": Way(
        lambda model: shoal.TensorParallel(plan=LOGITS | NORMS),
        ("tensor=2", "replicate=2,tensor=2"),
        ("transformer",),
    ),
    "Tensor sequence": Way(
        lambda model: shoal.TensorParallel(plan=PLAN | NORMS),
        ("tensor=4",),
        ("transformer",),
    ),
    "Tensor logits, FSDP": Way(
        lambda model: [shoal.TensorParallel(plan=LOGITS), shoal.FSDP(modules=("block",))],
        ("shard=2,tensor=2",),
        ("transformer",),
    ),
    "ActivationCheckpointing some, Tensor sequence, FSDP": Way(
        lambda model: [
            KEEPING[model],
            shoal.TensorParallel(plan=PLAN | NORMS),
            shoal.FSDP(modules=("block",)),
        ],
        ("shard=2,tensor=2",),
        ("transformer",),
    ),
    "ActivationCheckpointing some, DDP": Way(
        lambda model: [KEEPING[model], shoal.DDP(bucket_cap_mb=0.001)], ("replicate=4",)
    ),
    "ActivationCheckpointing some, FSDP": Way(
        lambda model: [KEEPING[model], shoal.FSDP(modules=UNITS[model])], ("shard=4",)
    ),
    "DevicePlacement, DDP": Way(
        # The rank's device, taken for two: hooks and order are tried, and moves elsewhere.
        lambda model: [shoal.DevicePlacement((0, 0), in_flight=2), shoal.DDP(bucket_cap_mb=0.001)],
        ("replicate=2", "replicate=3"),
    ),
    "DDP": Way(
        lambda model: shoal.DDP(bucket_cap_mb=0.001), ("replicate=2", "replicate=3", "replicate=4")
    ),
    "ZeRO-3": Way(
        lambda model: shoal.FSDP(modules=UNITS[model]), ("shard=1", "shard=2", "shard=3", "shard=4")
    ),
    "ZeRO-2": Way(
        lambda model: shoal.FSDP(modules=UNITS[model], reshard_after_forward=False, accumulate="whole"),
        ("shard=2", "shard=3"),
    ),
    "HSDP": Way(
        lambda model: shoal.FSDP(modules=UNITS[model]), ("replicate=2,shard=2", "replicate=4,shard=2")
    ),
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
