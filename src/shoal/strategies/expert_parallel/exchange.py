"""All-to-all of rows between ranks, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.world import World
from shoal.strategies.comm_timing import waiting


class Exchange:
    """Exchange of rows within a group of ranks, or with itself."""

    def __init__(self, world: World) -> None:
        self.ranks = range(world.layout.degree("expert"))
        mesh = world.mesh["expert"] if len(self.ranks) > 1 else None
        self.group = mesh.get_group() if mesh else None
        self.rank = mesh.get_local_rank() if mesh else 0
        self._world = world

    def own(self, number: int) -> range:
        """Return which of a number of experts this rank has."""
        each = number // len(self.ranks)
        return range(self.rank * each, (self.rank + 1) * each)

    def rows(self, size: int, rank: int) -> int:
        """Return the rows that a rank has of a DTensor with `size` rows, as torch.chunk cuts it."""
        each = -(-size // len(self.ranks))
        return max(0, min(each, size - rank * each))

    def __call__(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r, and return those that it sends. Collective.

        The gradient goes the other way.
        """
        result: Tensor = _Rows.apply(rows, self, sent, received)
        return result

    def moved(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows without gradients. Collective."""
        if self.group is None:
            return rows.view_as(rows)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        with waiting(self._world.timeline):
            dist.all_to_all_single(
                result, rows.contiguous(), list(received), list(sent), group=self.group
            )
        return result

    def numbers(self, numbers: Tensor) -> Tensor:
        """Send an equal part of `numbers` to each rank. Collective."""
        if self.group is None:
            return numbers
        result = torch.empty_like(numbers)
        with waiting(self._world.timeline):
            dist.all_to_all_single(result, numbers.contiguous(), group=self.group)
        if self._world.simulated:  # every rank sends what this one does
            return numbers.view(len(self.ranks), -1)[self.rank].repeat(len(self.ranks))
        return result


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, by: Exchange, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.by, ctx.sizes = by, (received, sent)
        return by.moved(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.by(gradient, *ctx.sizes), None, None, None


class Linked(torch.autograd.Function):
    """The outputs of no rows, with zeros as the gradients of the rows and the parameters.

    Without it, experts that get no rows would not take part in the backward pass, in which other ranks
    wait for the gradients of their rows.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, *given: Tensor) -> Tensor:
        """Return the outputs."""
        ctx.save_for_backward(*given)
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return zeros."""
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.zeros_like(each) if used else None for each, used in needed)
