"""Bytes on one rank, by kind.

The formulas of activations are those of Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5,
generalized to any width of the MLP, key and value heads, and 4-byte activations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.transformer import Transformer

FRAGMENTATION = 0.06
"""The part of activations and buffers that the allocator loses: assumed."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank of the stage that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    fragmentation: float

    @property
    def total(self) -> float:
        """All bytes."""
        return float(sum(asdict(self).values()))


def layer_activations(model: Transformer, plan: PlannedStep) -> float:
    """Return the bytes that one layer stores of one micro-batch until its backward pass."""
    layout = plan.layout
    unit = model.seq / layout.context * plan.micro_batch * model.hidden
    tensor = layout.tensor
    slices = tensor if plan.sequence_parallel else 1
    unsplit, split, scores = _bytes_per_unit(model)
    if plan.recompute == "full":
        return unit * plan.numbers.activation / slices
    kept = 0.0 if model.flash or plan.recompute == "selective" else scores / layout.context
    return unit * (unsplit / slices + (split + kept) / tensor) * plan.numbers.activation / 2


def _bytes_per_unit(model: Transformer) -> tuple[float, float, float]:
    """Return bytes per (sequence x batch x hidden): not split by tensor parallelism, split, scores."""
    width = model.width / model.hidden
    unsplit = 8.0 + 2 * model.dropout  # two norms, the inputs of attention and MLP, two masks
    split = 2 * (model.qkv / model.hidden + 1) + (2 + model.gated) * 2 * width
    scores = (2.0 + 3 * model.dropout) * model.heads * model.seq / model.hidden
    return unsplit, split, scores


def working_set(model: Transformer, plan: PlannedStep) -> float:
    """Return the bytes of the layer that is being recomputed; 0 without recomputation."""
    if plan.recompute == "none":
        return 0.0
    unit = model.seq / plan.layout.context * plan.micro_batch * model.hidden
    unsplit, split, scores = _bytes_per_unit(model)
    tensor = plan.layout.tensor
    kept = 0.0 if model.flash else scores / plan.layout.context
    if plan.recompute == "selective":
        return unit * kept / tensor * plan.numbers.activation / 2
    slices = tensor if plan.sequence_parallel else 1
    return unit * (unsplit / slices + (split + kept) / tensor) * plan.numbers.activation / 2


def stage_activations(model: Transformer, plan: PlannedStep, held: float | None = None) -> float:
    """Return the bytes of activations on the rank that holds most micro-batches: `held` if given."""
    layers = -(-model.layers // plan.layout.pipeline)
    held = held_micro_batches(plan) if held is None else held
    return held * layers * layer_activations(model, plan)


def held_micro_batches(plan: PlannedStep) -> float:
    """Return the largest number of micro-batches whose activations a rank of a pipeline holds.

    A stage of several on a rank counts as this part of a micro-batch. `pipeline_run` simulates the
    schedule, which gives the same number.
    """
    ranks, stages, count = plan.layout.pipeline, plan.stages, plan.micro_batches
    if ranks == 1:
        return 1.0
    if plan.schedule in ("gpipe", "looped"):
        return float(count)
    # Forward passes of all stages of a rank that begin before a first backward pass ends.
    if plan.schedule in ("zbv", "dualpipev"):
        begun = 2 * ranks + (plan.schedule == "dualpipev")
    else:
        in_round = count // max(1, count // ranks)
        interleaved = stages > 1 and plan.schedule != "zero-bubble"
        begun = (stages - 1) * in_round + (2 * ranks - 1 if interleaved else ranks)
    return min(begun / stages, float(count))


def stage_parameters(model: Transformer, plan: PlannedStep) -> float:
    """Return the parameters of one rank before sharding: of the stage with most."""
    layout = plan.layout
    layers = -(-model.layers // layout.pipeline) * model.layer_weights
    tables = model.embedding * (2 - model.tied if plan.both_tables else 1)
    return (layers + tables) / layout.tensor


def logit_bytes(model: Transformer, plan: PlannedStep) -> float:
    """Return the bytes of the output layer's result: float32 scores, their gradient, the product."""
    tokens = model.seq / plan.layout.context * plan.micro_batch
    columns = model.vocab / (plan.layout.tensor if plan.splits_logits else 1)
    return tokens * columns * (8 + plan.numbers.activation)


def message_bytes(model: Transformer, plan: PlannedStep) -> float:
    """Return the bytes of the buffers of tensor and context parallelism."""
    if plan.layout.tensor == plan.layout.context == 1:
        return 0.0
    tokens = model.seq / plan.layout.context * plan.micro_batch
    return 2 * tokens * model.hidden * plan.numbers.activation


def estimate_memory(
    model: Transformer, plan: PlannedStep, *, held: float | None = None
) -> MemoryEstimate:
    """Return the bytes of a rank of the stage that needs most: the first or the last.

    `held` is the number of micro-batches that it holds, if the schedule was simulated.
    """
    numbers, layout = plan.numbers, plan.layout
    all_parameters = stage_parameters(model, plan)
    parameters = all_parameters / plan.shards
    logits = logit_bytes(model, plan)
    activations = stage_activations(model, plan, held) + working_set(model, plan)
    buffers = message_bytes(model, plan)
    if layout.shard > 1:
        # Two gathered layers, one in use and one prefetched, and the gradient of one.
        layer = max(model.layer_weights, model.embedding) / layout.tensor
        buffers += numbers.gathered * (all_parameters if plan.keeps_parameters else 2 * layer)
        several = plan.keeps_gradients and plan.micro_batches > 1
        buffers += numbers.reduced * (all_parameters if several else layer)
    elif plan.copies > 1:
        buffers += min(25e6 * 2, numbers.reduced * parameters)  # two buckets
    return MemoryEstimate(
        parameters=parameters * numbers.parameter,
        gradients=parameters * numbers.gradient,
        optimizer=parameters * numbers.state,
        activations=activations,
        logits=logits,
        buffers=buffers,
        fragmentation=FRAGMENTATION * (activations + logits + buffers),
    )
