"""All-to-all of rows between ranks, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self.timeline = world.timeline
        self._simulated = world.simulated

    def own(self, number: int) -> range:
        """Return which of a number of experts this rank has."""
        each = number // len(self.ranks)
        return range(self.rank * each, (self.rank + 1) * each)

    def rows(self, size: int, rank: int) -> int:
        """Return the rows that a rank has of a DTensor with `size` rows, as torch.chunk cuts it."""
        each = -(-size // len(self.ranks))
        return max(0, min(each, size - rank * each))

    def __call__(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> Tensor:
        """Send `sent[r]` rows to each rank r, and return those that it sends. Collective.

        The functions `meanwhile` run during the exchange, and their backward during that of the
        gradient, which goes the other way.
        """
        forth, back = _Transfer(self, sent, received), _Transfer(self, received, sent)
        started = _Started.apply(rows, forth, back)
        for function in meanwhile:
            function()
        result: Tensor = _Arrived.apply(started, forth, back)
        return result

    def moved(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows without gradients. Collective."""
        transfer = _Transfer(self, sent, received)
        transfer.begin(rows)
        return transfer.take()

    def numbers(self, numbers: Tensor) -> Tensor:
        """Send an equal part of `numbers` to each rank. Collective."""
        if self.group is None:
            return numbers
        result = torch.empty_like(numbers)
        with waiting(self.timeline):
            dist.all_to_all_single(result, numbers.contiguous(), group=self.group)
        if self._simulated:  # every rank sends what this one does
            return numbers.view(len(self.ranks), -1)[self.rank].repeat(len(self.ranks))
        return result


class _Transfer:
    """One direction of an exchange, with the work that was started last."""

    _rows: Tensor

    def __init__(self, by: Exchange, sent: Sequence[int], received: Sequence[int]) -> None:
        self.by = by
        self.sent, self.received = list(sent), list(received)
        self._work: dist.Work | None = None

    def begin(self, rows: Tensor) -> None:
        """Start an exchange whose rows `take` returns."""
        self._rows = self.start(rows)

    def take(self) -> Tensor:
        """Return the rows once they are there."""
        self.wait()
        rows = self._rows
        del self._rows  # autograd keeps the transfer
        return rows

    def start(self, rows: Tensor) -> Tensor:
        """Return the tensor in which rows arrive until `wait` returns."""
        if self.by.group is None:
            return rows.view_as(rows)
        self.wait()
        result = rows.new_empty((sum(self.received), *rows.shape[1:]))
        self._work = dist.all_to_all_single(
            result, rows.contiguous(), self.received, self.sent, group=self.by.group, async_op=True
        )
        if torch.is_anomaly_enabled():  # it reads a gradient as soon as it is returned
            self.wait()
        return result

    def wait(self) -> None:
        """Wait for the rows."""
        work, self._work = self._work, None
        if work is not None:
            with waiting(self.by.timeline):
                work.wait()


class _Started(torch.autograd.Function):
    """Start the exchange of rows; in backward, wait for that of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forth: _Transfer, back: _Transfer) -> Tensor:
        ctx.back = back
        forth.begin(rows)
        return rows.view_as(rows)  # autograd wants a gradient of the shape of what it returns

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.back.wait()
        return gradient, None, None


class _Arrived(torch.autograd.Function):
    """Wait for the rows; in backward, start the exchange of their gradient."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, forth: _Transfer, back: _Transfer) -> Tensor:
        ctx.back = back
        return forth.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back = ctx.back
        if torch.is_grad_enabled():  # for gradients of gradients
            return back.by(gradient, back.sent, back.received), None, None
        return back.start(gradient), None, None


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
