"""Activation checkpointing that leaves the module and its names as they are."""

from __future__ import annotations

from typing import Any

from torch import nn


def checkpoint(module: nn.Module, **options: Any) -> None:
    """Recompute the forward of `module` in backward.

    The public `checkpoint_wrapper` changes parameter names; this composable one hooks the module.
    """
    from torch.distributed._composable.checkpoint_activation import checkpoint as composable

    composable(module, **options)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint` was applied to `module` itself."""
    from torch.distributed._composable.contract import _get_registry

    return "checkpoint" in (_get_registry(module) or {})
