"""Reducers turn a rank's gradients into the global batch's: contract and local reducer.

The other reducers are those of DDP (data_parallel/ddp.py), of FSDP (fsdp/engine.py) and of parameters
that are sharded over mesh axes (mesh_reducer.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import Count
from shoal.data.micro import MicroBatch
from shoal.strategies.contracts import no_gradient
from shoal.strategies.correction import AnyTotals, DeviceTotals, Factor, Totals
from shoal.strategies.held_parameters import HeldParameters, as_scalar


class Reducer(ABC):
    """Reducer of this rank's gradients to those of the global batch, with its sums and norm."""

    held: HeldParameters
    reports_loss: bool = True
    """Whether the losses of this rank are counted; see `Engine.reports_loss`."""
    waits_because: str = ""
    """See `Engine.waits_because`."""

    @abstractmethod
    def backward(
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of `scale * weight * loss / size`; reduce over ranks if it is the `last`."""

    @abstractmethod
    def totals(self) -> AnyTotals:
        """Return the sums of the batch and the gradient norm, on an accelerator without waiting for it.

        Collective.
        """

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, a compiled forward, such that its backward delivers gradients as it goes."""
        return call

    @property
    def pending(self) -> bool:
        """Whether there are sums of an unfinished batch."""
        return bool(self.held.losses)

    def multiply(self, factor: Factor) -> None:
        """Multiply the gradients by `factor`."""
        self.held.multiply(factor)

    def discard(self) -> None:
        """Clear the gradients, and drop the sums recorded for their batch."""
        self.held.clear()

    def synchronize(self) -> None:  # noqa: B027 - nothing may differ
        """Make all state the same on all ranks; see `Engine.synchronize`. Collective."""

    def state(self) -> dict[str, Any]:
        """Return the state to save; see `Engine.state`."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - keeping nothing is normal
        """Restore the value that `state` returned."""


class LocalReducer(Reducer):
    """Reducer for one process with the complete global batch: the specification of the others."""

    def __init__(self, held: HeldParameters) -> None:
        self.held = held

    def backward(
        self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of the loss, and keep it for the sums; see the contract."""
        seed = backward_seed(loss, scale * micro.weight / size)
        torch.autograd.backward([loss], [seed], inputs=self.held.leaves(loss))
        self.held.losses.append((loss.detach(), count, micro.weight))
        if last:
            self.held.print_unused()

    def totals(self) -> AnyTotals:
        """Return the sums of the losses and the norm of the gradients."""
        self.held.check()
        norm = self.held.norm()
        losses = [one for one in self.held.losses if one[2]]
        self.held.losses.clear()
        if norm.device.type == "cpu" and not any(isinstance(count, Tensor) for _, count, _ in losses):
            loss_sum = sum(loss.item() for loss, _, _ in losses)
            return Totals(loss_sum, sum(float(count) for _, count, _ in losses), norm.item())
        loss_sums, counts = sums(losses, norm)
        return DeviceTotals(torch.stack((loss_sums, counts, norm)))


def backward_seed(loss: Tensor, factor: float) -> Tensor:
    """Return the initial gradient of backward of `factor * loss`. Raise StepError without a graph."""
    if not loss.requires_grad:
        raise no_gradient()
    return torch.full_like(loss, factor)


def sums(losses: list[tuple[Tensor, Count, float]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of `losses` and of their counts, with dtype and device of `like`."""
    zero = like.new_zeros(())
    total = sum((loss.to(zero) for loss, _, _ in losses), zero)
    return total, sum((as_scalar(count, zero) for _, count, _ in losses), zero)
