"""How the layers of a transformer are split over the stages of a pipeline.

Stages get equal FLOPs, as `shoal.Pipeline` splits a model, so that the last one has fewer layers if the
output layer is large. Where the number of layers does not divide, the first stages have fewer. The
stages of Megatron-LM have equal numbers of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shoal.distributed.pipeline_schedules import stage_owners
from shoal.tools.plan.work.planned_step import PlannedStep, Quantity
from shoal.tools.plan.work.transformer import Transformer


@dataclass(frozen=True)
class StageSplit:
    """Layers and tables of ranks of a pipeline.

    The busiest rank has most FLOPs: its layers, whether it has the output layer, and the layers of
    earlier stages that are waited for at the ends of a step. The largest rank has most parameters: its
    layers and tables. `most` are the most layers of a rank, and `last` those of the rank with the
    output layer.
    """

    busiest: Quantity
    head: Quantity
    earlier: Quantity
    largest: Quantity
    tables: Quantity
    most: Quantity
    last: Quantity


@lru_cache(maxsize=4096)
def balanced_layers(layers: int, head: float, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, so that the FLOPs of the largest stage are least.

    `head` are the FLOPs of the output layer relative to those of a layer. At least `stages` - 1 layers
    are required: the last stage may have the output layer only.
    """
    if stages == 1:
        return (layers,)
    before = stages - 1
    rest = min(
        range(before, layers + 1),
        key=lambda rest: (max(-(-rest // before), layers - rest + head), rest),
    )
    found = [layers - rest]
    for left in range(before, 0, -1):
        found.append(-(-rest // left))
        rest -= found[-1]
    return tuple(reversed(found))


def stage_layers(model: Transformer, plan: PlannedStep) -> Sequence[float]:
    """Return the layers of each stage of a plan."""
    stages = int(plan.layout.pipeline * plan.stages)
    return _layers(model, stages, even=plan.split_sends)


def split_layers(model: Transformer, plan: PlannedStep) -> StageSplit:
    """Return the layers of the ranks of a plan, or of many plans."""

    def split(plan: PlannedStep) -> StageSplit:
        one = np.vectorize(_split, otypes=[np.float64] * 7, excluded=(0,))
        pipeline = plan.layout.pipeline
        return StageSplit(*one(model, pipeline, plan.stages, plan.folded, plan.split_sends))

    return plan.tabulate(("pipeline", "stages", "schedule"), split)


def _layers(model: Transformer, stages: int, *, even: bool) -> Sequence[float]:
    if even:
        return (model.layers / stages,) * stages
    return balanced_layers(model.layers, model.head_layers, stages)


@lru_cache(maxsize=4096)
def _split(model: Transformer, ranks: int, stages: int, folded: bool, even: bool) -> tuple[float, ...]:
    """Return the fields of `StageSplit`."""
    count = ranks * stages
    layers = _layers(model, count, even=even)
    owners = stage_owners(count, ranks, folded=folded)
    own = [sum(layers[s] for s in range(count) if owners[s] == rank) for rank in range(ranks)]
    output = owners[-1]
    tables = [float(rank == 0) + (rank == output) for rank in range(ranks)]
    tables[output] -= output == 0 and model.tied  # one table is both
    busiest = max(range(ranks), key=lambda r: (own[r] + (r == output) * model.head_layers, r))
    largest = max(
        range(ranks), key=lambda r: own[r] * model.layer_weights + tables[r] * model.embedding
    )
    return (
        own[busiest],
        float(busiest == output),
        # In a folded pipeline, the gradients of weights fill the time after the last backward pass.
        0.0 if folded else sum(layers[:busiest]),
        own[largest],
        tables[largest],
        max(own),
        own[output],
    )
