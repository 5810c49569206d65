"""Options of context parallelism: each sequence is split over ranks (Jacobs et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.coupling.batch_norm import refuse_coupled
from shoal.strategies.module_patterns import find_units
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Context parallelism: each rank of the `context` axis computes a slice of every sequence.

    The hidden state, of shape (batch, length, features), is split along its length where it enters the
    first unit and gathered where it leaves the last. Other inputs that have the dimension of the
    sequence, such as rotary tables, are split in the same way. Modules outside the units see full
    sequences on each rank. Within the units, `scaled_dot_product_attention` exchanges slices with all
    heads for full sequences with some of the heads (Ulysses: Jacobs et al. 2023, section 3); every
    other operation must act on each position separately. `is_causal` stays exact; other masks raise
    `StepError`.

    Put this strategy before the one that sums gradients. If you pass it alone, Shoal adds the default
    strategy of the layout.

    Args:
        modules: Patterns of module names, such as "blocks.*". Each match is a unit. None means the
            repeated blocks of the model. Default: None.
        check: Run the first forward pass two more times, split and unsplit, and compare the outputs;
            four more times if the model draws random numbers, to find which of them belong to the slice
            of each rank. With False, each rank draws different ones. Default: True.

    Raises:
        StepError: If the model has no such units, or one unit contains another.

    Examples:
        >>> strategy = [shoal.ContextParallel(modules=("blocks.*",)), shoal.FSDP()]
    """

    axes: ClassVar[tuple[str, ...]] = ("context",)

    modules: Sequence[str] | None = None
    check: bool = True

    def spread(self, model: nn.Module, world: World) -> None:
        """Make the units compute slices. Module names stay the same; copies compute full sequences."""
        wanted = {id(unit) for unit in find_units(model, self.modules)}
        units = {name: unit for name, unit in model.named_modules() if id(unit) in wanted}
        nested = [name for name in units if any(_within(name, other) for other in units)]
        if not units or nested:
            raise StepError(
                given=f"shoal.ContextParallel(modules={self.modules!r}) for a {type(model).__name__}",
                found=f"{nested[0]} is a unit inside another unit"
                if nested
                else "the model has no repeated blocks",
                fix='pass shoal.ContextParallel(modules=("encoder.*",)), with names as in '
                "named_modules()",
            )
        if world.layout.degree("context") > 1:
            refuse_coupled(model, "shoal.ContextParallel()", "each rank has a slice of each sample")
            from shoal.strategies.context_parallel.sequence_slices import slice_units

            slice_units(model, units, world, check=self.check)


def _within(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}." if other else "")
