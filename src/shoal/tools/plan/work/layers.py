"""The work of a transformer by its dimensions: of its layers, its output layer and its embedding.

A GPU computes a product in tiles of the result, one per processor at a time. A last round with few
tiles takes as long as a full one, and small tiles load more bytes per FLOP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shoal.tools.plan.work.planned_step import PlannedStep, Quantity, Work
from shoal.tools.plan.work.transformer import Transformer

_OTHER_OPERATIONS = 14
"""Operations of a layer's forward pass that are neither products nor attention."""
LOSS_BYTES = 16
"""Bytes that the loss reads and writes per score, forward and backward, in float32: cast, log_softmax,
their gradients."""

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its speed relative to the largest: assumed, from the bytes that a
tile loads per FLOP."""
_FILL = 96
"""Terms of a sum that a tile could have computed while it starts and while it writes its result."""
_SPLITS = (1, 2, 4, 8)
"""Parts into which the terms of a sum are split, if the result has few tiles."""
_UNALIGNED = 2.5
"""Time of a product whose rows do not begin at multiples of 16 bytes, relative to aligned rows."""

EAGER = 1.5
"""Bytes of element-wise operations, relative to fused kernels (1 to 3): norms and activations of eager
PyTorch read and write intermediate results."""

Shape = tuple[Quantity, Quantity, Quantity]
"""Rows, columns and terms of each sum of a matrix product."""


@dataclass(frozen=True)
class TransformerWork:
    """The work of one micro-batch: of a layer, of the output layer, and of the embedding's gradient.

    `recompute` is what a layer computes again before its backward pass. `overlapped` are the gradients
    of weights that need no sum over the gradients of inputs. `experts` are the products of experts in
    `forward` and `backward`.
    """

    forward: Work
    backward: Work
    recompute: Work
    head: Work
    table: Work
    overlapped: tuple[Work, Work]
    experts: Work


_CAST_BYTES, _CAST_OPERATIONS = 5, 2
"""Of a cast of a number from 16 to 8 bits: it is read for the largest one, read again, and written."""


def product_work(shape: Shape, size: Quantity, units: int | None, fp8: Quantity = 0) -> Work:
    """Return the work of one matrix product of numbers of `size` bytes.

    With `fp8`, its operands are cast to 8 bits (dynamic scales, as torchao has).
    """
    rows, columns, inner = shape
    flops, operands = tiled_flops(rows, columns, inner, units), rows * inner + inner * columns
    return Work(
        products=flops * (1 - fp8),
        fp8_products=flops * fp8,
        product_bytes=(size - fp8) * operands + size * rows * columns,
        traffic=_CAST_BYTES * operands * fp8,
        operations=1 + 2 * _CAST_OPERATIONS * fp8,
    )


def gradient_work(shape: Shape, size: Quantity, units: int | None, fp8: Quantity = 0) -> Work:
    """Return the work of both gradients of a matrix product: of its input and of its weights."""
    rows, columns, inner = shape
    return product_work((rows, inner, columns), size, units, fp8) + product_work(
        (columns, inner, rows), size, units, fp8
    )


def own_experts(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the number of MLPs of a layer on one rank."""
    return max(1, model.experts) / plan.layout.expert


def layer_products(model: Transformer, plan: PlannedStep) -> tuple[Shape, ...]:
    """Return the products of a layer's forward pass: queries to values, output, MLP up, MLP down.

    Those of the MLP are of one of the rank's experts.
    """
    tensor, hidden, rows = plan.layout.tensor, model.hidden, plan.tokens(model.seq)
    routed = rows * max(1, model.choices) / own_experts(model, plan)
    return (
        (rows, model.qkv / tensor, hidden),
        (rows, hidden, hidden / tensor),
        (routed, (1 + model.gated) * model.width / tensor, hidden),
        (routed, hidden, model.width / tensor),
    )


def transformer_work(model: Transformer, plan: PlannedStep, units: int | None) -> TransformerWork:
    """Return the work of one micro-batch, on a device with this many processors."""
    size, tensor, rows = plan.numbers.activation, plan.layout.tensor, plan.tokens(model.seq)
    fp8 = plan.numbers.fp8
    shapes = layer_products(model, plan)
    count = own_experts(model, plan)
    forwards = [product_work(shape, size, units, fp8) for shape in shapes]
    backwards = [gradient_work(shape, size, units, fp8) for shape in shapes]
    for works in (forwards, backwards):
        works[2:] = [each * count for each in works[2:]]
    rest = sum(forwards[:-1], Work())
    # Read and written: two norms, the sum with the residual, its mask of dropout; the activation; heads
    # that plain attention transposes.
    residual = rows * model.hidden * (3 * size + model.dropout) / plan.slices
    unsplit = rows * model.hidden * 2 * 2 * size / plan.slices
    moved = 0 if model.flash else 2 * model.qkv
    split = rows * ((2 + model.gated) * model.token_width + moved) * size / tensor
    split += 4 * rows * model.choices * model.hidden * size  # sorted by expert, and back
    times = EAGER if plan.eager else 1.0
    rest += Work(traffic=times * (residual + unsplit + split), operations=_OTHER_OPERATIONS)
    # The last product of the MLP, and the sum after it.
    last = forwards[-1] + Work(traffic=times * residual, operations=1)
    attention = _attention_work(model, plan)
    forward = attention + rest + last
    # Products have two gradients; fused attention recomputes its scores: five products instead of
    # four. Element-wise operations read one more tensor than forward; three operands are cast, not two.
    backward = replace(
        sum(backwards, Work()),
        attention=forward.attention * (2.5 if model.flash else 2),
        traffic=1.5 * forward.traffic,
        operations=2 * forward.operations,
    )
    # Without dropout, no gradient needs the output of the last product, and torch stops before it.
    full = rest + last if model.dropout else rest
    again = attention * (plan.recompute != "none") + full * (plan.recompute == "full")
    overlapped = [
        product_work((columns, inner, rows), size, units, fp8) for rows, columns, inner in shapes[::2]
    ]
    table = model.embedding / tensor
    return TransformerWork(
        forward=forward,
        backward=backward,
        recompute=again,
        head=_head_work(model, plan, units),
        # The gradient of the embedding is zeros, to which the rows of the tokens are added.
        table=Work(traffic=table * (plan.layout.pipeline == 1) * 2 * size, operations=2),
        overlapped=(overlapped[0], overlapped[1]),
        experts=sum([*forwards[2:], *backwards[2:]], Work()) * bool(model.experts),
    )


def _attention_work(model: Transformer, plan: PlannedStep) -> Work:
    """Return the work of scores and their products with queries, keys and values.

    Fused attention skips the blocks above the diagonal and stores no scores. The plain one writes
    scores, reads those below the diagonal and writes all in softmax, reads and writes them in dropout,
    and reads the result.
    """
    size, tensor, rows = plan.numbers.activation, plan.layout.tensor, plan.tokens(model.seq)
    flops = 4 * rows * model.seq * model.hidden / tensor
    if model.flash:
        return Work(attention=0.5 * flops, operations=1)
    passes = 3.5 * size + model.dropout * (2 * size + 1)
    scores = rows * model.seq * model.heads / tensor
    return Work(attention=flops, traffic=scores * passes, operations=5)


def _head_work(model: Transformer, plan: PlannedStep, units: int | None) -> Work:
    """Return the work of the output layer and the loss, forward and backward, of one micro-batch."""
    size, rows, columns = (
        plan.numbers.activation,
        plan.tokens(model.seq),
        model.vocab / plan.layout.tensor,
    )
    shape = (rows, columns, model.hidden)
    product = product_work(shape, size, units) + gradient_work(shape, size, units)
    aligned = replace(product, products=product.products * alignment_factor(columns, size))
    scores = rows * np.where(plan.splits_logits, columns, model.vocab)
    return aligned + Work(traffic=scores * LOSS_BYTES, operations=12)


def tiled_flops(rows: Quantity, columns: Quantity, inner: Quantity, units: int | None) -> Quantity:
    """Return the FLOPs that `units` processors could have computed in the time of a product.

    The result has `rows` times `columns` numbers, each the sum of `inner` terms. Without a number of
    processors, these are the FLOPs of the product.
    """
    if units is None:
        return 2 * rows * columns * inner
    if any(isinstance(each, np.ndarray) for each in (rows, columns, inner)):
        return np.vectorize(_tiled_flops, otypes=[np.float64])(rows, columns, inner, units)
    return _tiled_flops(rows, columns, inner, units)


@lru_cache(maxsize=65536)
def _tiled_flops(rows: float, columns: float, inner: float, units: int) -> float:
    useful = 2 * rows * columns * inner
    least = math.inf
    for high, wide, speed in _TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide)
        for parts in _SPLITS:
            if parts > 1 and inner / parts < 4 * _FILL:
                break
            rounds = math.ceil(tiles * parts / units)
            terms = inner / parts + _FILL
            least = min(least, rounds * units * 2 * high * wide * terms / speed)
    return max(least, useful)


def alignment_factor(columns: Quantity, size: Quantity) -> Quantity:
    """Return the factor on the time of a product whose rows have this many numbers of `size` bytes."""
    return np.where(columns * size % 16 == 0, 1.0, _UNALIGNED)
