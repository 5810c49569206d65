"""How gradients become those of the global batch: the contract, and what one process does.

The other reducers are DDP's (data_parallel/ddp.py), FSDP's (fsdp/engine.py) and that of parameters
which are divided over axes of the mesh (mesh_reducer.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import Count
from shoal.data.micro import Micro
from shoal.strategies.contracts import Totals, no_gradient
from shoal.strategies.held_parameters import HeldParameters, as_scalar


class Reducer(ABC):
    """Makes the gradients that this rank holds those of the global batch, and its sums and norm."""

    held: HeldParameters
    reports_loss: bool = True
    """Whether the losses of this rank are counted; see `Engine.reports_loss`."""

    @abstractmethod
    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of `scale * weight * loss / size`; reduce over ranks if it is the `last`."""

    @abstractmethod
    def totals(self) -> Totals:
        """Return the sums of the batch and the norm of its gradients, in one transfer from the device.

        Collective.
        """

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, a compiled forward, such that its backward delivers gradients as it goes."""
        return call

    @property
    def pending(self) -> bool:
        """Whether there are sums of a batch that was not finished."""
        return bool(self.held.losses)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor`."""
        self.held.multiply(factor)

    def discard(self) -> None:
        """Drop the gradients, and what was recorded of the batch that they are of."""
        self.held.clear()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most take any
        """Raise StepError for an optimizer that can't step on these parameters."""

    def synchronize(self) -> None:  # noqa: B027 - nothing may differ
        """Make the same what differs between ranks; see `Engine.synchronize`. Collective."""

    def state(self) -> dict[str, Any]:
        """Return what has to be kept; see `Engine.state`."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - keeping nothing is normal
        """Take back what `state` returned."""


class LocalReducer(Reducer):
    """Reduces nothing: one process has the whole batch. This is the specification of the others."""

    def __init__(self, held: HeldParameters) -> None:
        self.held = held

    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Run backward of the loss, and keep it for the sums; see the contract."""
        seed = backward_seed(loss, scale * micro.weight / size)
        torch.autograd.backward([loss], [seed], inputs=self.held.leaves())
        self.held.losses.append((loss.detach(), count, micro.weight))
        if last:
            self.held.print_unused()

    def totals(self) -> Totals:
        """Return the sums of the losses and the norm of the gradients as they stand."""
        self.held.check()
        norm = self.held.norm()
        losses = [one for one in self.held.losses if one[2]]
        self.held.losses.clear()
        if norm.device.type == "cpu" and not any(isinstance(count, Tensor) for _, count, _ in losses):
            loss_sum = sum(loss.item() for loss, _, _ in losses)
            return Totals(loss_sum, sum(float(count) for _, count, _ in losses), norm.item())
        loss_sums, counts = sums(losses, norm)
        return Totals(*torch.stack((loss_sums, counts, norm)).tolist())


def backward_seed(loss: Tensor, factor: float) -> Tensor:
    """Return the gradient with which backward of `factor * loss` starts; StepError if none can."""
    if not loss.requires_grad:
        raise no_gradient()
    return torch.full_like(loss, factor)


def sums(losses: list[tuple[Tensor, Count, float]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of `losses` and that of their counts, with dtype and device of `like`."""
    zero = like.new_zeros(())
    total = sum((loss.to(zero) for loss, _, _ in losses), zero)
    return total, sum((as_scalar(count, zero) for _, count, _ in losses), zero)
