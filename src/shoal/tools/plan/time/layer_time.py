"""Seconds of one transformer layer on one rank: an additive roofline.

A matrix product takes 2MNK / (efficiency x peak) + bytes / (efficiency x bandwidth) + launch, and an
element-wise operation the last two. Layers whose operations are shorter than the host needs to start
them wait for the host: (device^4 + host^4)^(1/4).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.time.collectives import RankGroup, collective_seconds
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.products import tiled_flops
from shoal.tools.plan.work.transformer import Transformer

_OTHER_OPERATIONS = 14
"""Operations of a layer's forward pass that are neither products nor attention."""


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes and operations of one pass over a layer."""

    products: float = 0.0
    product_bytes: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    operations: float = 0.0
    convolutions: float = 0.0

    def __mul__(self, factor: float) -> Work:
        return Work(
            self.products * factor,
            self.product_bytes * factor,
            self.attention * factor,
            self.traffic * factor,
            self.operations * factor,
            self.convolutions * factor,
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.product_bytes + other.product_bytes,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.operations + other.operations,
            self.convolutions + other.convolutions,
        )


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds on the device by kind, and those that it waits for the host."""

    products: float = 0.0
    convolutions: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    host: float = 0.0

    def __add__(self, other: ComputeSeconds) -> ComputeSeconds:
        return ComputeSeconds(*map(float.__add__, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> ComputeSeconds:
        return ComputeSeconds(*(factor * each for each in astuple(self)))

    @property
    def total(self) -> float:
        """All seconds."""
        device = self.products + self.convolutions + self.attention + self.memory
        return device + self.launch + self.host


Shape = tuple[float, float, float]
"""Rows, columns and terms of each sum of a matrix product."""


def product_work(shape: Shape, size: int, units: int | None) -> Work:
    """Return the work of one matrix product of numbers of `size` bytes."""
    rows, columns, inner = shape
    moved = size * (rows * inner + inner * columns + rows * columns)
    return Work(products=tiled_flops(rows, columns, inner, units), product_bytes=moved, operations=1)


def gradient_work(shape: Shape, size: int, units: int | None) -> Work:
    """Return the work of both gradients of a matrix product: of its input and of its weights."""
    rows, columns, inner = shape
    return product_work((rows, inner, columns), size, units) + product_work(
        (columns, inner, rows), size, units
    )


def layer_products(model: Transformer, plan: PlannedStep) -> tuple[Shape, ...]:
    """Return the products of a layer's forward pass: queries to values, output, MLP up, MLP down."""
    tensor, hidden = plan.layout.tensor, model.hidden
    rows = plan.micro_batch * model.seq / plan.layout.context
    return (
        (rows, model.qkv / tensor, hidden),
        (rows, hidden, hidden / tensor),
        (rows, (1 + model.gated) * model.width / tensor, hidden),
        (rows, hidden, model.width / tensor),
    )


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer's forward pass on one micro-batch."""

    attention: Work
    """Scores and their products with queries, keys and values."""
    rest: Work
    last: Work
    """The last product of the MLP and the sum after it."""
    gradients: Work
    """The products of the backward pass, except those of attention."""

    @property
    def forward(self) -> Work:
        """All of the forward pass."""
        return self.attention + self.rest + self.last


def layer_work(model: Transformer, plan: PlannedStep, units: int | None) -> LayerWork:
    """Return the work of a layer on one micro-batch, on a device with this many processors."""
    layout, size = plan.layout, plan.numbers.activation
    tensor, hidden = layout.tensor, model.hidden
    rows = plan.micro_batch * model.seq / layout.context
    slices = tensor if plan.sequence_parallel else 1
    shapes = layer_products(model, plan)
    rest = sum((product_work(shape, size, units) for shape in shapes[:-1]), Work())
    # Read and written: two norms, the sum with the residual, its mask of dropout; the activation; heads
    # that plain attention transposes.
    residual = rows * hidden * (3 * size + model.dropout) / slices
    unsplit = rows * hidden * 2 * 2 * size / slices
    moved = 0 if model.flash else 2 * model.qkv
    split = rows * ((2 + model.gated) * model.width + moved) * size / tensor
    rest += Work(traffic=residual + unsplit + split, operations=_OTHER_OPERATIONS)
    scores = rows * model.seq * model.heads / tensor
    # Fused attention skips the blocks above the diagonal and stores no scores. The plain one writes
    # scores, reads those below the diagonal and writes all in softmax, reads and writes them in
    # dropout, and reads the result.
    flops = 4 * rows * model.seq * hidden / tensor * (0.5 if model.flash else 1.0)
    passes = 0.0 if model.flash else 3.5 * size + model.dropout * (2 * size + 1)
    return LayerWork(
        attention=Work(attention=flops, traffic=scores * passes, operations=1 if model.flash else 5),
        rest=rest,
        last=product_work(shapes[-1], size, units) + Work(traffic=residual, operations=1),
        gradients=sum((gradient_work(shape, size, units) for shape in shapes), Work()),
    )


def compute_seconds(work: Work, plan: PlannedStep, machine: Machine) -> ComputeSeconds:
    """Return the seconds of some work on one device."""
    rates = machine.efficiency
    peak = machine.half if plan.numbers.activation == 2 else machine.tf32 or machine.fp32
    products = work.products / (rates.product * peak)
    convolutions = work.convolutions / (rates.convolution * peak)
    attention = work.attention / (rates.attention * peak)
    memory = (work.product_bytes + work.traffic) / (rates.memory * machine.memory_bandwidth)
    host = work.operations * rates.host
    if machine.is_cpu:  # the host computes
        return ComputeSeconds(products, convolutions, attention, memory, 0.0, host)
    launch = work.operations * rates.launch
    device = products + convolutions + attention + memory + launch
    waited = (device**4 + host**4) ** 0.25 - device
    return ComputeSeconds(products, convolutions, attention, memory, launch, waited)


def backward_work(model: Transformer, work: LayerWork, recompute: str) -> tuple[Work, Work]:
    """Return the work of the backward pass, and that of the recomputation before it."""
    again = {"none": Work(), "selective": work.attention, "full": work.attention + work.rest}[recompute]
    if recompute == "full" and model.dropout:
        # Without dropout, no gradient needs the output of the last product, and torch stops before it.
        again += work.last
    forward = work.forward
    # Products have two gradients; fused attention recomputes its scores: five products instead of
    # four. Element-wise operations read one more tensor than forward.
    return replace(
        work.gradients,
        attention=forward.attention * (2.5 if model.flash else 2),
        traffic=1.5 * forward.traffic,
        operations=2 * forward.operations,
    ), again


def layer_communication(model: Transformer, plan: PlannedStep, machine: Machine) -> tuple[float, float]:
    """Return the seconds of tensor and of context parallelism in forward and backward of a layer."""
    layout = plan.layout
    rows = plan.micro_batch * model.seq / layout.context
    full = rows * model.hidden * plan.numbers.activation
    context = RankGroup(layout.context, layout.tensor)
    # All-to-all of queries, keys and values, and back; twice in backward, again if recomputed.
    passes = 3 + (plan.recompute == "full")
    sent = full * (model.qkv / model.hidden + 1) / layout.tensor
    context_seconds = passes * collective_seconds("all_to_all", sent, context, machine)
    return _tensor_seconds(model, plan, machine, full), context_seconds


def _tensor_seconds(model: Transformer, plan: PlannedStep, machine: Machine, full: float) -> float:
    """Return the seconds of tensor parallelism, with activations of `full` bytes."""
    group = RankGroup(plan.layout.tensor, 1)
    if group.size == 1:
        return 0.0
    # Two sums per pass. Under sequence parallelism, a sum is a reduce-scatter and an all-gather.
    sums = 4 + (1 + model.dropout) * (plan.recompute == "full")
    reduce = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
    one = collective_seconds(reduce, full, group, machine)
    gather = collective_seconds("all_gather", full, group, machine) if plan.sequence_parallel else 0.0
    hidden = 0.0
    if plan.tensor_overlap:
        # The sum over the gradients of an input needs no gradients of weights.
        size = plan.numbers.activation
        queries, _, up, _ = layer_products(model, plan)
        for rows, columns, inner in (queries, up):
            work = product_work((columns, inner, rows), size, machine.units)
            hidden += min(one, compute_seconds(work, plan, machine).total)
    return sums * (one + gather) - hidden
