"""Rows of other ranks, for losses that couple the samples of a batch, such as contrastive losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.micro import CURRENT_MICRO, MicroBatch
from shoal.distributed import objects
from shoal.distributed.reductions import all_reduce
from shoal.distributed.tensors import all_gather
from shoal.util.errors import StepError

if TYPE_CHECKING:
    from shoal.distributed.world import World


_CALLS: ContextVar[list[int] | None] = ContextVar("calls of gather", default=None)


@contextmanager
def gather_calls() -> Iterator[list[int]]:
    """Record the numbers of rows that are gathered inside."""
    calls: list[int] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


class GatheredRows(NamedTuple):
    """The rows of all data-parallel ranks, as `shoal.gather` and `batch.gather` return them.

    Attributes:
        all: Tensor of shape (rows of all ranks, …), ordered by position.
        start: Index in `all` of this rank's first row.

    Examples:
        >>> rows = shoal.GatheredRows(torch.zeros(8, 2), start=4)
        >>> rows.all.shape[0], rows.start
        (8, 4)
    """

    all: Tensor
    start: int


def gather(tensor: Tensor) -> GatheredRows:
    """Return the rows of `tensor` from all data-parallel ranks, in the functions of a Task. Collective.

    Use it for losses that couple the samples of a batch, such as contrastive losses. The rows of
    padding samples are left out. Gradients flow back to the rows of every rank: if each rank adds up
    the losses of its own rows, loss and gradient are the same as on one process. Only samples of the
    same micro-batch are coupled, so loss and gradient depend on the number of micro-batches. In a
    custom training loop, call `batch.gather`.

    Args:
        tensor: Tensor of shape (rows, …); the number of rows may differ between ranks.

    Returns:
        The rows of all data-parallel ranks, and the index of this rank's first row.

    Raises:
        StepError: If no function of a Task is running.

    Examples:
        >>> def loss(output, batch):
        ...     everyone, start = shoal.gather(output)
        ...     own = torch.arange(start, start + len(output))
        ...     scores = output @ everyone.T
        ...     return torch.nn.functional.cross_entropy(scores, own, reduction="sum"), len(output)
        >>> task = shoal.Task(loss)
    """
    micro = CURRENT_MICRO.get()
    if micro is None:
        raise StepError(
            given="shoal.gather(…)",
            found="no function of a Task is running",
            fix="call it in the loss, inputs or model of a Task; use batch.gather(…) in a custom "
            "training loop",
        )
    return gather_rows(tensor, micro)


def gather_rows(tensor: Tensor, micro: MicroBatch) -> GatheredRows:
    """Return the rows of `tensor` from all data ranks, for a given micro-batch; see `gather`."""
    calls = _CALLS.get()
    if calls is not None:
        calls.append(len(tensor))
    world = micro.world
    if micro.place is not None and micro.place.whole:
        raise StepError(
            given="shoal.gather(…) with exact='bits'",
            found="each virtual rank is computed alone, and ranks have different numbers of them",
            fix="leave exact out: shoal.init() is exact up to rounding with shoal.gather",
        )
    if world is None or world.data_group is None:
        return GatheredRows(tensor, 0)
    # A padding sample stays in the graph, so that its backward is collective too.
    own = tensor if micro.weight else tensor[:0]
    lengths = objects.gather_numbers(len(own), world.data_group)
    rows: Tensor = _GatherRows.apply(own, world, lengths)
    return GatheredRows(rows, sum(lengths[: world.data_rank]))


class _GatherRows(torch.autograd.Function):
    """All-gather of rows; its backward sums the gradients of a rank's rows over all ranks' losses."""

    @staticmethod
    def forward(context: Any, own: Tensor, world: World, lengths: list[int]) -> Tensor:
        context.world, context.lengths = world, lengths
        padded = own.new_zeros((max(lengths), *own.shape[1:]))
        padded[: len(own)] = own
        parts = all_gather(padded, world.data_group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own: Tensor = _SumRows.apply(gradients[0], context.world, context.lengths)
        return own, None, None


class _SumRows(torch.autograd.Function):
    """This rank's rows of the sum over all ranks; its backward gathers the rows of all ranks."""

    @staticmethod
    def forward(context: Any, rows: Tensor, world: World, lengths: list[int]) -> Tensor:
        context.world, context.lengths = world, lengths
        total = rows.clone(memory_format=torch.contiguous_format)
        all_reduce(total, "sum", world.data_group)
        own: Tensor = total.split(lengths)[world.data_rank].clone()
        return own

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        all_rows: Tensor = _GatherRows.apply(gradients[0], context.world, context.lengths)
        return all_rows, None, None
