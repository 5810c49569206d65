"""Memory for time: activations that are computed again (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.errors import StepError
from shoal.parallel.units import find_units
from shoal.world import World


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Units keep their inputs only and run again in backward, with the same random numbers.

    `units` are patterns of module names such as "blocks.*", or None for the repeated blocks of the
    model. Comes before the strategy that sums gradients: `[shoal.Recompute(), shoal.FSDP()]`; alone it
    is followed by the one of the layout. What a unit counts in forward, such as the running statistics
    of BatchNorm, it counts twice.
    """

    axes: ClassVar[tuple[str, ...]] = ()

    units: Sequence[str] | None = None

    def spread(self, model: nn.Module, world: World) -> None:
        """Let the units run again in backward; names stay as they are."""
        from torch.distributed._composable.checkpoint_activation import checkpoint

        units = find_units(model, self.units)
        if not units:
            raise StepError(
                given=f"shoal.Recompute() for a {type(model).__name__}",
                found="no blocks that repeat",
                fix='shoal.Recompute(units=("encoder", "decoder")), with names as in named_modules()',
            )
        for unit in units:
            checkpoint(unit)


def runs_again(model: nn.Module) -> bool:
    """Whether a part of `model` runs again in backward."""
    from torch.distributed._composable.contract import _get_registry

    registries = (_get_registry(part) for part in model.modules())
    return any("checkpoint" in registry for registry in registries if registry)
