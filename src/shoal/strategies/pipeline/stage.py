"""A stage as torch's pipelining runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import is_view
from shoal._torch.dispatch import TreeSpec, tree_flatten, tree_unflatten
from shoal._torch.modules import call_uncompiled
from shoal.distributed.world import World
from shoal.strategies.local import mixed
from shoal.strategies.partition.inputs import Inputs
from shoal.strategies.partition.stages import Stage
from shoal.util.errors import StepError

_TENSOR = object()
"""Where a tensor stood among an output's leaves, of which others may be None."""


class StageModule(nn.Module):
    """A stage as torch's pipelining runs it: tensors in, tensors out."""

    def __init__(self, stage: Stage, world: World, *, last: bool) -> None:
        super().__init__()
        self.body = stage.body
        self.autocast: torch.dtype | None = None
        self.inputs: Sequence[Inputs] = []
        """Of the model, for each micro-batch. torch would look for gradients of what it is given."""
        self._needed = stage.needed
        self._last = last
        self._device = world.device
        self._spec: TreeSpec
        self._others: list[Any] = []
        self._alone: Callable[[], Any] | None = None

    def run_alone(self, call: Callable[[], Any]) -> Any:
        """`call`, within the hooks of this stage, which gather its parameters."""
        self._alone = call
        try:
            return call_uncompiled(self, micro=0)
        finally:
            self._alone = None

    def forward(self, *received: Tensor, micro: int) -> Any:
        """Run the stage on what it received and on those inputs of the model that it needs."""
        if self._alone is not None:
            return self._alone()
        inputs = self.inputs[micro]
        with mixed(self._device, self.autocast):
            output = self.body(*received, *(inputs[name] for name in self._needed))
        if self._last:
            leaves, self._spec = tree_flatten(output)
            self._others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return tuple(_sendable(value, received) for value in output)

    def whole(self, tensors: Sequence[Tensor] | Tensor) -> Any:
        """The model's output, of whose tensors the last stage was left with."""
        rest = iter((tensors,) if isinstance(tensors, Tensor) else tensors)
        leaves = [next(rest) if other is _TENSOR else other for other in self._others]
        return tree_unflatten(leaves, self._spec)


def _sendable(value: object, received: Sequence[Tensor]) -> Tensor:
    if not isinstance(value, Tensor):
        raise StepError(
            given="a pipeline whose stages exchange what they compute",
            found=f"a {type(value).__name__} that one stage computes and a later one needs; only "
            "tensors travel",
            fix="compute it again where it is needed, or choose other split points",
        )
    if torch.is_grad_enabled() and learns(value.dtype) and not value.requires_grad:
        return value.detach().contiguous().requires_grad_()  # of a frozen stage: torch sends gradients
    # torch detaches what is sent in place: no view, and nothing that only passes through.
    shared = is_view(value) or any(value is tensor for tensor in received)
    return value.clone() if shared else value.contiguous()


def learns(dtype: torch.dtype) -> bool:
    """Whether gradients travel back for what was sent."""
    return dtype.is_floating_point or dtype.is_complex
