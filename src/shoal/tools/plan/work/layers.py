"""The work of a transformer by its dimensions: of its layers, its output layer and its embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.products import alignment_factor, tiled_flops
from shoal.tools.plan.work.quantities import Quantity, choose
from shoal.tools.plan.work.segments import Work
from shoal.tools.plan.work.transformer import Transformer

_OTHER_OPERATIONS = 14
"""Operations of a layer's forward pass that are neither products nor attention."""
LOSS_BYTES = 16
"""Bytes that the loss reads and writes per score, forward and backward, in float32: cast, log_softmax,
their gradients."""

Shape = tuple[Quantity, Quantity, Quantity]
"""Rows, columns and terms of each sum of a matrix product."""


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer on one micro-batch: forward, backward, and again before it (`recompute`)."""

    forward: Work
    backward: Work
    recompute: Work


def product_work(shape: Shape, size: Quantity, units: int | None) -> Work:
    """Return the work of one matrix product of numbers of `size` bytes."""
    rows, columns, inner = shape
    moved = size * (rows * inner + inner * columns + rows * columns)
    return Work(products=tiled_flops(rows, columns, inner, units), product_bytes=moved, operations=1)


def gradient_work(shape: Shape, size: Quantity, units: int | None) -> Work:
    """Return the work of both gradients of a matrix product: of its input and of its weights."""
    rows, columns, inner = shape
    return product_work((rows, inner, columns), size, units) + product_work(
        (columns, inner, rows), size, units
    )


def layer_products(model: Transformer, plan: PlannedStep) -> tuple[Shape, ...]:
    """Return the products of a layer's forward pass: queries to values, output, MLP up, MLP down."""
    tensor, hidden, rows = plan.layout.tensor, model.hidden, plan.tokens(model.seq)
    return (
        (rows, model.qkv / tensor, hidden),
        (rows, hidden, hidden / tensor),
        (rows, (1 + model.gated) * model.width / tensor, hidden),
        (rows, hidden, model.width / tensor),
    )


def layer_work(model: Transformer, plan: PlannedStep, units: int | None) -> LayerWork:
    """Return the work of a layer on one micro-batch, on a device with this many processors."""
    size, tensor, rows = plan.numbers.activation, plan.layout.tensor, plan.tokens(model.seq)
    shapes = layer_products(model, plan)
    rest = sum((product_work(shape, size, units) for shape in shapes[:-1]), Work())
    # Read and written: two norms, the sum with the residual, its mask of dropout; the activation; heads
    # that plain attention transposes.
    residual = rows * model.hidden * (3 * size + model.dropout) / plan.slices
    unsplit = rows * model.hidden * 2 * 2 * size / plan.slices
    moved = 0 if model.flash else 2 * model.qkv
    split = rows * ((2 + model.gated) * model.width + moved) * size / tensor
    rest += Work(traffic=residual + unsplit + split, operations=_OTHER_OPERATIONS)
    # The last product of the MLP, and the sum after it.
    last = product_work(shapes[-1], size, units) + Work(traffic=residual, operations=1)
    attention = _attention_work(model, plan)
    forward = attention + rest + last
    # Products have two gradients; fused attention recomputes its scores: five products instead of
    # four. Element-wise operations read one more tensor than forward.
    backward = replace(
        sum((gradient_work(shape, size, units) for shape in shapes), Work()),
        attention=forward.attention * (2.5 if model.flash else 2),
        traffic=1.5 * forward.traffic,
        operations=2 * forward.operations,
    )
    # Without dropout, no gradient needs the output of the last product, and torch stops before it.
    full = rest + last if model.dropout else rest
    again = attention * (plan.recompute != "none") + full * (plan.recompute == "full")
    return LayerWork(forward, backward, again)


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


def head_work(model: Transformer, plan: PlannedStep, units: int | None) -> Work:
    """Return the work of the output layer and the loss, forward and backward, of one micro-batch."""
    size, rows, columns = (
        plan.numbers.activation,
        plan.tokens(model.seq),
        model.vocab / plan.layout.tensor,
    )
    shape = (rows, columns, model.hidden)
    product = product_work(shape, size, units) + gradient_work(shape, size, units)
    aligned = replace(product, products=product.products * alignment_factor(columns, size))
    scores = rows * choose(plan.splits_logits, columns, model.vocab)
    return aligned + Work(traffic=scores * LOSS_BYTES, operations=12)


def table_work(model: Transformer, plan: PlannedStep) -> Work:
    """Return the work of the embedding's gradient: zeros, to which the rows of the tokens are added."""
    table = model.embedding / plan.layout.tensor * (plan.layout.pipeline == 1)
    return Work(traffic=table * 2 * plan.numbers.activation, operations=2)
