"""Rows of other ranks, for losses that couple the samples of a batch, such as contrastive losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.micro import CURRENT_MICRO, Micro
from shoal.distributed import objects
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.distributed.world import World


class GatheredRows(NamedTuple):
    """`all` rows of the data ranks, ordered by position; this rank's rows begin at `start`."""

    all: Tensor
    start: int


def gather(tensor: Tensor) -> GatheredRows:
    """Return the rows of `tensor` from all data ranks, within the functions of a Task. Collective.

    `tensor` has shape (rows, ...); ranks may have different numbers of rows. The rows of padding
    samples are left out. Gradients flow back to the rows of every rank. If each rank adds up the
    losses of its own rows,

        def loss(output, batch):
            everyone, start = shoal.gather(output)
            own = torch.arange(start, start + len(output))
            return F.cross_entropy(output @ everyone.T, own, reduction="sum"), len(output)

    loss and gradient are those of one process. Only samples of the same micro-batch are coupled, so
    loss and gradient depend on the number of micro-batches. In a custom training loop, call
    `batch.gather`. Raises StepError outside a micro-batch.
    """
    micro = CURRENT_MICRO.get()
    if micro is None:
        raise StepError(
            given="shoal.gather(…)",
            found="no function of a Task is running",
            fix="call it in the loss, inputs or model of a Task; batch.gather(…) in a custom training "
            "loop",
        )
    return gather_rows(tensor, micro)


def gather_rows(tensor: Tensor, micro: Micro) -> GatheredRows:
    """Return the rows of `tensor` from all data ranks, for a given micro-batch; see `gather`."""
    world = micro.world
    if world is None or world.data_group is None:
        return GatheredRows(tensor, 0)
    # A padding sample stays in the graph, so that its backward is collective too.
    own = tensor if micro.weight else tensor[:0]
    lengths = objects.gather_numbers(len(own), world.data_group)
    rows: Tensor = _GatherRows.apply(own, world, lengths)
    return GatheredRows(rows, sum(lengths[: world.data_rank]))


class _GatherRows(torch.autograd.Function):
    """All-gather of rows; the backward sums the gradients of a rank's rows over all ranks' losses."""

    @staticmethod
    def forward(context: Any, own: Tensor, world: World, lengths: list[int]) -> Tensor:
        context.world, context.lengths = world, lengths
        padded = own.new_zeros((max(lengths), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=world.data_group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        world, lengths = context.world, context.lengths
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=world.data_group)
        return total.split(lengths)[world.data_rank], None, None
