"""Counts of the tokens that each expert was chosen for, kept on the device until a Run reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.autograd import in_backward
from shoal.data.coupling.step import CoupledStep
from shoal.distributed.world import World

_ATTRIBUTE = "_shoal_routed"


class RoutedTokens:
    """How often this rank's tokens have chosen each expert of a module, in training steps.

    Tokens of padding samples do not count, and recomputed ones count once. A pickled or copied module
    counts nothing.

    Attributes:
        name: Name of the module of experts.
        counts: Tensor of shape (experts + 1,) on the device; the last number is of dropped choices.
    """

    def __init__(self, name: str, number: int, world: World | None = None) -> None:
        self.name = name
        self._step = None if world is None else world.service(CoupledStep)
        device = None if world is None else world.device
        self.counts = torch.zeros(number + 1, dtype=torch.int64, device=device)

    def __reduce__(self) -> tuple[object, ...]:
        return RoutedTokens, (self.name, len(self.counts) - 1)

    def attach(self, module: nn.Module) -> None:
        """Let a Run find these counts."""
        vars(module)[_ATTRIBUTE] = self

    def before_forward(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Count as a forward pre-hook of experts that are all on this rank, not in compiled code."""
        index = given[1] if len(given) > 1 and not torch.compiler.is_compiling() else None
        if isinstance(index, Tensor) and index.dim() == 2:
            self.add(module, index)

    def add(self, module: nn.Module, index: Tensor) -> None:
        """Count chosen experts of shape (tokens, choices), a number without an expert for none."""
        if self._step is None or not module.training or in_backward():
            return
        micro = self._step.micro
        if micro is None or not micro.weight:  # outside a step, or padding
            return
        real = index[: len(index) * micro.samples // self._step.rows].flatten().long()
        none = len(self.counts) - 1
        real = real.masked_fill(real < 0, none).clamp(max=none)
        self.counts.scatter_add_(0, real, torch.ones_like(real))


def routed_tokens(model: nn.Module) -> list[RoutedTokens]:
    """Return the counts of a model's modules of experts, in their order."""
    parts = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return [part for part in parts if isinstance(part, RoutedTokens)]
