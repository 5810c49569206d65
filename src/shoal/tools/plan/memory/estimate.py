"""Bytes on one rank by kind, from the dimensions of a transformer: of one plan, or of many as arrays.

The formulas of activations are those of Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5,
generalized to any width of the MLP, key and value heads, and 4-byte activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.tools.plan.work.planned_step import PlannedStep, Quantity
from shoal.tools.plan.work.stage_layers import split_layers
from shoal.tools.plan.work.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the moment of a step at which it needs most.

    In a trace, `activations` were allocated in the forward pass, `temporary` in the backward pass, the
    update and the checks on the first batch. `communication` are gathered parameters and buffers of
    collectives. `moment` says when: "forward", "backward", "update" or "checks". `reserved` is what
    torch's allocator takes from a GPU, with rounding and fragmentation; 0 if it is not known.
    """

    kinds: Mapping[str, Quantity]
    moment: str = ""
    reserved: int = 0

    @property
    def total(self) -> Quantity:
        """All bytes."""
        return sum(self.kinds.values())


FRAGMENTATION = 0.06
"""The part of activations and buffers that the allocator loses: assumed."""
PUBLISHED_MARGIN = 0.08
"""The part of the predicted bytes that a training may need in addition. Of the published rows, the one
that exceeds its prediction most needs 6 % more (docs/guides/plan-accuracy.md)."""
_BUCKETS = 25e6 * 2
"""Bytes of the buckets of gradients."""


def layer_activations(model: Transformer, plan: PlannedStep) -> tuple[Quantity, Quantity]:
    """Return the bytes that one layer stores of one micro-batch until its backward pass.

    The second number is that of the layer that is being recomputed, in addition.
    """
    unit = plan.tokens(model.seq) * model.hidden * plan.numbers.activation / 2
    tensor, slices = plan.layout.tensor, plan.slices
    width = model.token_width / model.hidden
    # Not split by tensor parallelism: the inputs of two norms, which autocast converts to float32, and
    # two masks; the inputs of attention and MLP, which only Megatron-LM gathers again in backward.
    converted = plan.eager & (plan.numbers.parameter > plan.numbers.activation)
    norms = (4.0 + 4 * converted + 2 * model.dropout) / slices
    unsplit = norms + 4 / np.where(plan.split_sends, slices, 1)
    # An MLP with a gate: its two products, the activation (fused kernels compute it again), their
    # product.
    columns = 2 + model.gated * (1 + plan.eager)
    split = (2 * (model.qkv / model.hidden + 1) + columns * 2 * width) / tensor
    split += 4.0 * model.choices  # what experts get and return
    scores = (2.0 + 3 * model.dropout) * model.heads * model.seq / model.hidden
    kept = 0.0 if model.flash else scores / plan.layout.context / tensor
    full, some = plan.recompute == "full", plan.recompute == "selective"
    every = unsplit + split + kept
    stored = np.where(full, 2.0 / slices, np.where(some, unsplit + split, every))
    return unit * stored, unit * np.where(full, every, np.where(some, kept, 0.0))


def held_micro_batches(plan: PlannedStep, *, last: bool = False) -> Quantity:
    """Return the largest number of micro-batches whose activations a rank of a pipeline holds.

    The rank is the first one, which holds most, or the `last`. A stage of several on a rank counts as
    this part of a micro-batch.
    """
    ranks, stages, count, name = plan.layout.pipeline, plan.stages, plan.micro_batches, plan.schedule
    # Forward passes of all stages of a rank that begin before a first backward pass ends.
    interleaved = (stages > 1) & (name != "zero-bubble")
    in_round = count // np.maximum(1, count // ranks)
    before: Quantity = ranks - 1 + interleaved * (ranks - 1)
    if last:
        before = np.where(plan.splits, before, 0)
    usual = (stages - 1) * in_round + 1 + before
    begun = np.where(plan.folded, 2 * ranks + (name == "dualpipev"), usual)
    some = np.minimum(begun / stages, count)
    return np.where(ranks == 1, 1.0, np.where(_forwards_first(plan), count, some))


def _forwards_first(plan: PlannedStep) -> Quantity:
    """Return whether a pipeline runs all forward passes before the first backward pass."""
    name = plan.schedule
    return (plan.layout.pipeline > 1) & ((name == "gpipe") | (name == "looped"))


def stage_parameters(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the parameters of one rank before sharding: of the stage with most."""
    return sum(_stage_parts(model, plan))


def sharded_parameters(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the parameters that one rank keeps. FSDP shards over the expert axis too."""
    shared, experts = _stage_parts(model, plan)
    return (shared / np.where(plan.sharded, plan.layout.expert, 1) + experts) / plan.shards


def _stage_parts(model: Transformer, plan: PlannedStep) -> tuple[Quantity, Quantity]:
    """Return the parameters that every token passes, and those of a rank's experts."""
    split = split_layers(model, plan)
    layers = np.ceil(split.largest)
    experts = layers * model.expert_weights / plan.layout.expert
    return (
        layers * model.shared_weights + split.tables * model.embedding
    ) / plan.layout.tensor, experts


def _logit_bytes(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the bytes of the output layer's result, and of the loss.

    If all forward passes come first, they keep the result and a third of the loss of each micro-batch.
    """
    columns = model.vocab / np.where(plan.splits_logits, plan.layout.tensor, 1)
    others = np.where(_forwards_first(plan), plan.micro_batches - 1, 0)
    result = plan.numbers.activation
    each = plan.score_bytes + result + others * (plan.score_bytes / 3 + result)
    return plan.tokens(model.seq) * columns * each


def _buffer_bytes(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the bytes of the buffers of collectives."""
    layout, numbers = plan.layout, plan.numbers
    parameters = stage_parameters(model, plan)
    # The gathered inputs of attention and MLP, and their gradients.
    sent = 4 * plan.tokens(model.seq) * model.hidden * numbers.activation
    messages = np.where((layout.tensor > 1) | (layout.context > 1), sent, 0.0)
    # Two gathered layers, one in use and one prefetched, and the gradient of one.
    experts = model.expert_weights / layout.expert
    layer = np.maximum(model.shared_weights / layout.tensor + experts, model.embedding / layout.tensor)
    several = plan.keeps_gradients & (plan.micro_batches > 1)
    gathered = numbers.gathered * np.where(plan.keeps_parameters, parameters, 2 * layer)
    gathered += numbers.reduced * np.where(several, parameters, layer)
    buckets = np.where(plan.copies > 1, np.minimum(_BUCKETS, numbers.reduced * parameters), 0.0)
    return messages + np.where(plan.sharded, gathered, buckets)


def estimate_memory(model: Transformer, plan: PlannedStep) -> RankMemory:
    """Return the bytes of the rank that needs most: the first of a pipeline, or the last."""
    parameters, numbers = sharded_parameters(model, plan), plan.numbers
    # FSDP copies a shard to 16 bits only to gather it.
    own = np.where(plan.sharded, np.minimum(numbers.parameter, 4), numbers.parameter)
    stored, again = layer_activations(model, plan)
    split = split_layers(model, plan)
    first = held_micro_batches(plan) * np.ceil(split.most) * stored
    last = held_micro_batches(plan, last=True) * np.ceil(split.last) * stored
    logits = _logit_bytes(model, plan)
    first_logits = np.where(plan.both_tables, logits, 0.0)
    later = last + logits > first + first_logits
    moving = {
        "activations": np.where(later, last, first) + again,
        "logits": np.where(later, logits, first_logits),
        "buffers": _buffer_bytes(model, plan),
    }
    kinds = {
        "parameters": parameters * own,
        "gradients": parameters * numbers.gradient,
        "optimizer": parameters * numbers.state,
        **moving,
        "fragmentation": FRAGMENTATION * sum(moving.values()),
    }
    return RankMemory(kinds={name: one if np.ndim(one) else float(one) for name, one in kinds.items()})
