"""Long sequences divided over neighbouring ranks: context parallelism (Jacobs et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.distributed.world import World
from shoal.strategies.module_patterns import find_units
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Each rank of the axis `context` computes the units of the model for a slice of every sequence.

    `modules` are patterns of module names such as "blocks.*", or None for the repeated blocks of the
    model. The hidden state, of shape (batch, length, features), is cut along its length where it enters
    the first unit and put together where it leaves the last; tensors that come with it along the
    sequence, such as rotary tables, are cut alike. What lies outside sees whole sequences on each rank.
    In the units `scaled_dot_product_attention` exchanges slices of all heads for whole sequences of
    some (Ulysses: Jacobs et al. 2023, section 3), and everything else acts on each position by itself.
    With `check` the first forward runs twice more, cut and whole, and the outputs are compared.

    Comes before the strategy that sums gradients, `[shoal.ContextParallel(), shoal.FSDP()]`; alone it
    is followed by the one of the layout. `is_causal` stays exact, other masks are refused.
    """

    axes: ClassVar[tuple[str, ...]] = ("context",)

    modules: Sequence[str] | None = None
    check: bool = True

    def spread(self, model: nn.Module, world: World) -> None:
        """Let the units work on slices; names stay as they are, and copies are whole again."""
        wanted = {id(unit) for unit in find_units(model, self.modules)}
        units = {name: unit for name, unit in model.named_modules() if id(unit) in wanted}
        nested = [name for name in units if any(_within(name, other) for other in units)]
        if not units or nested:
            raise StepError(
                given=f"shoal.ContextParallel(modules={self.modules!r}) for a {type(model).__name__}",
                found=f"{nested[0]} is a unit inside another" if nested else "no blocks that repeat",
                fix='shoal.ContextParallel(modules=("encoder.*",)), with names as in named_modules()',
            )
        if world.layout.degree("context") > 1:
            from shoal.strategies.context_parallel.sequence_slices import slice_units

            slice_units(model, units, world, check=self.check)


def _within(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}." if other else "")
