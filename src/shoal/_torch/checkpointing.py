"""Activation checkpointing that leaves the module and its names as they are."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal._torch.versions import imported


def checkpoint(module: nn.Module, **options: Any) -> None:
    """Recompute the forward of `module` in backward.

    The public `checkpoint_wrapper` changes parameter names; this composable one hooks the module.
    """
    place = "torch.distributed._composable.checkpoint_activation"
    imported(place, "checkpoint", "ActivationCheckpointing")(module, **options)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint` was applied to `module` itself."""
    place = "torch.distributed._composable.contract"
    registry = imported(place, "_get_registry", "ActivationCheckpointing")(module)
    return "checkpoint" in (registry or {})
