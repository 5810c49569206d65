"""Layouts and models that no pipeline supports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.partition.stages import Stage
from shoal.util.errors import LayoutError, StepError


def refuse_layout(world: World, given: str, *, degree: int, fix: str) -> None:
    """Raise LayoutError for a layout without a `pipeline` axis, or with a `context` axis.

    `degree` is that of a `pipeline` axis to suggest, and `fix` what to use in place of `context`.
    """
    if world.layout.degree("pipeline") == 1:
        found = "the layout has no `pipeline` axis"
        fix = (
            f"call shoal.init(layout='pipeline={degree}'), or 'replicate=2,pipeline=2' for two replicas"
        )
    elif world.layout.degree("context") > 1:
        found = "sequences are sliced before the first block and gathered after the last, "
        found += "which are on different ranks"
    else:
        return
    raise LayoutError(given=f"{given} with layout='{world.layout}'", found=found, fix=fix)


def refuse_unused(model: nn.Module, stages: Sequence[Stage], given: str) -> None:
    """Raise StepError for trainable parameters that no stage uses."""
    held = frozenset[str]().union(*(stage.names for stage in stages))
    named = model.named_parameters(remove_duplicate=False)
    loose = [name for name, p in named if p.requires_grad and name not in held]
    if loose:
        raise StepError(
            given=given,
            found=f"parameters that its forward does not use: {', '.join(loose[:3])}",
            fix="remove them, or freeze them with requires_grad_(False) beforehand",
        )
