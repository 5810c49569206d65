"""Bytes on one rank, by kind.

The formulas of activations are those of Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5,
generalized to any width of the MLP, key and value heads, and 4-byte activations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.plan.configuration import PlannedStep
from shoal.plan.model import Transformer

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


def stage_activations(model: Transformer, plan: PlannedStep) -> float:
    """Return the bytes of activations on the first stage, which holds most micro-batches."""
    stages = plan.layout.pipeline
    held = float(min(stages, plan.micro_batches))
    if plan.stages > 1:
        held = min(held + (stages - 1) / plan.stages, plan.micro_batches)
    layers = -(-model.layers // stages)
    return held * layers * layer_activations(model, plan)


def stage_parameters(model: Transformer, plan: PlannedStep) -> float:
    """Return the parameters of one rank before sharding: of the stage with most."""
    layout = plan.layout
    layers = -(-model.layers // layout.pipeline) * model.layer_weights
    tables = model.embedding * (2 - model.tied if layout.pipeline == 1 else 1)
    return (layers + tables) / layout.tensor


def estimate_memory(model: Transformer, plan: PlannedStep) -> MemoryEstimate:
    """Return the bytes of a rank of the stage that needs most: the first or the last."""
    numbers, layout = plan.numbers, plan.layout
    parameters = stage_parameters(model, plan) / layout.shard
    tokens = model.seq / layout.context * plan.micro_batch
    # float32 scores, their gradient and the 16-bit output of the last product.
    logits = tokens * model.vocab / layout.tensor * (8 + numbers.activation)
    activations = stage_activations(model, plan) + working_set(model, plan)
    buffers = 0.0
    if layout.shard > 1:
        # Two gathered layers, one in use and one prefetched, and the gradient of one.
        layer = max(model.layer_weights, model.embedding) / layout.tensor
        buffers = layer * (2 * numbers.gathered + numbers.reduced)
    elif layout.replicate > 1:
        buffers = 25e6 * 2
    if layout.tensor > 1 or layout.context > 1:
        buffers += 2 * tokens * model.hidden * numbers.activation
    return MemoryEstimate(
        parameters=parameters * numbers.parameter,
        gradients=parameters * numbers.gradient,
        optimizer=parameters * numbers.state,
        activations=activations,
        logits=logits,
        buffers=buffers,
        fragmentation=FRAGMENTATION * (activations + logits + buffers),
    )
