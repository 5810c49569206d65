"""Memory for time: activations that are computed again (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shoal._torch.checkpointing import checkpoint, is_checkpointed
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
"""What can be kept, and the operations of torch (aten) that compute it."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Units keep their inputs only and run again in backward, with the same random numbers.

    `modules` are patterns of module names such as "blocks.*", or None for the repeated blocks of the
    model. `save` names results that are kept as well, so that only the rest is computed again
    (Korthikanti et al. 2022): "products" of matrices and convolutions, and fused "attention". Comes
    before the strategy that sums gradients: `[shoal.ActivationCheckpointing(), shoal.FSDP()]`; alone
    it is followed by the one of the layout. What a unit counts in forward, such as the running
    statistics of BatchNorm, it counts twice.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = True

    modules: Sequence[str] | None = None
    save: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.save, str) or not set(self.save) <= OPERATIONS.keys():
            raise StepError(
                given=f"shoal.ActivationCheckpointing(save={self.save!r})",
                found=f"a tuple of these can be kept: {', '.join(map(repr, OPERATIONS))}",
                fix='shoal.ActivationCheckpointing(save=("products", "attention"))',
            )

    def spread(self, model: nn.Module, world: World) -> None:
        """Let the units run again in backward; names stay as they are."""
        units = find_units(model, self.modules)
        if not units:
            raise StepError(
                given=f"shoal.ActivationCheckpointing() for a {type(model).__name__}",
                found="no blocks that repeat",
                fix='shoal.ActivationCheckpointing(modules=("encoder", "decoder")), with names as in '
                "named_modules()",
            )
        options: dict[str, Any] = {}
        if self.save:
            names = [name for word in self.save for name in OPERATIONS[word]]
            policy = partial(_decide, {getattr(torch.ops.aten, name).default for name in names})
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        for unit in units:
            checkpoint(unit, **options)


def runs_again(model: nn.Module) -> bool:
    """Whether a part of `model` runs again in backward."""
    return bool(units_that_run_again(model))


def units_that_run_again(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` that run again in backward."""
    return [part for part in model.modules() if is_checkpointed(part)]


def _decide(
    kept: Collection[Any], _: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether the result of an operation of torch's is kept, or computed again."""
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
