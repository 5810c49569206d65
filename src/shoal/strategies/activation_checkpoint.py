"""Activation checkpointing: recompute activations in backward to save memory (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shoal._torch.autograd import checkpoint, is_checkpointed
from shoal.distributed.world import World
from shoal.strategies.module_patterns import find_units
from shoal.util.errors import StepError

OPERATIONS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Values of `save`, and the operations of torch (aten) whose results they keep."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Activation checkpointing (gradient checkpointing): recompute activations in backward.

    Each unit keeps only its inputs and runs its forward pass again in the backward pass, with the same
    random numbers (Chen et al. 2016). Put this strategy before the one that sums gradients. If you pass
    it alone, Shoal adds the default strategy of the layout. BatchNorm updates its running statistics
    once; other state that a unit changes in its forward pass is changed twice.

    Args:
        modules: Patterns of module names, such as "blocks.*". Each match is recomputed as a unit. None
            means the repeated blocks of the model. Default: None.
        save: Results to keep, so that only the rest is recomputed (Korthikanti et al. 2022): "products"
            keeps the results of matrix products and convolutions, "attention" those of fused attention.
            Default: (), which keeps none.

    Raises:
        StepError: If `save` contains another value, or the model has no such units.

    Examples:
        >>> strategy = [shoal.ActivationCheckpointing(save=("attention",)), shoal.FSDP()]
    """

    axes: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = True

    modules: Sequence[str] | None = None
    save: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.save, str) or not set(self.save) <= OPERATIONS.keys():
            raise StepError(
                given=f"shoal.ActivationCheckpointing(save={self.save!r})",
                found=f"save is a tuple of values from {', '.join(map(repr, OPERATIONS))}",
                fix='shoal.ActivationCheckpointing(save=("products", "attention"))',
            )

    def spread(self, model: nn.Module, world: World) -> None:
        """Make the units recompute their activations. Module names stay the same."""
        units = find_units(model, self.modules)
        if not units:
            raise StepError(
                given=f"shoal.ActivationCheckpointing() for a {type(model).__name__}",
                found="the model has no repeated blocks",
                fix='pass shoal.ActivationCheckpointing(modules=("encoder", "decoder")), with names '
                "as in named_modules()",
            )
        options: dict[str, Any] = {}
        if self.save:
            names = [name for word in self.save for name in OPERATIONS[word]]
            policy = partial(_decide, {getattr(torch.ops.aten, name).default for name in names})
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        for unit in units:
            checkpoint(unit, **options)


def runs_again(model: nn.Module) -> bool:
    """Return whether a part of `model` is recomputed in backward."""
    return bool(units_that_run_again(model))


def units_that_run_again(model: nn.Module) -> list[nn.Module]:
    """Return the parts of `model` that are recomputed in backward."""
    return [part for part in model.modules() if is_checkpointed(part)]


def _decide(
    kept: Collection[Any], _: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return whether to keep the result of a torch operation or to recompute it."""
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
