"""Models that torch.compile has wrapped: the module in them, and how it was to be compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizedModule

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with the backend and options that it was given."""


def bare(model: nn.Module) -> nn.Module:
    """The user's own module, whose parameters have their own names: what torch.compile wrapped."""
    while _is_compiled(model):
        model = model._orig_mod
    return model


def compiler_of(model: object) -> Compiler | None:
    """How torch.compile was to compile the module in `model`; None for any other object."""
    return model.dynamo_ctx if _is_compiled(model) else None


def _is_compiled(model: object) -> TypeGuard[OptimizedModule]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # torch.compile has imported it
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)
