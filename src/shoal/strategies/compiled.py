"""Models that torch.compile has wrapped: their module, and the options of the compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from shoal._torch.modules import compiled_module

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with a backend and options."""


def bare(model: nn.Module) -> nn.Module:
    """Return the user's module, with the original parameter names, from a compiled model."""
    while (wrapped := compiled_module(model)) is not None:
        model = wrapped
    return model
