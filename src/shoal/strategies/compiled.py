"""Models that torch.compile has wrapped: the module in them, and how it was to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from shoal._torch.modules import compiled_module

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with the backend and options that it was given."""


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, whose parameters have their own names, from a compiled model."""
    while (wrapped := compiled_module(model)) is not None:
        model = wrapped
    return model
