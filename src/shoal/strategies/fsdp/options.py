"""Options of fully sharded data parallelism (FSDP2): parameters and optimizer state are sharded.

Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP). torch's `fully_shard` gathers the parameters
of one unit at a time and scatters its gradients. The engine decides which sums are computed, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.local import local_engine
from shoal.strategies.module_patterns import find_units
from shoal.util.arguments import check_choice
from shoal.util.errors import LayoutError, StepError

if TYPE_CHECKING:
    from shoal.strategies.fsdp.engine import GatheredPrecision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Fully sharded data parallelism (FSDP2, ZeRO): ranks shard parameters and optimizer state.

    Each rank of the layout's `shard` axis keeps a shard of every parameter, of its gradient and of its
    optimizer state. If the layout also has a `replicate` axis, its degree is the number of copies of
    each shard, and gradients are summed over both axes (HSDP). Rajbhandari et al. 2020; Zhao et al.
    2023.

    With `parallelize(Model, world, FSDP())`, that is, with a function that creates the model, no rank
    ever has the complete model in memory. The parameters get the same values.

    Args:
        modules: Patterns of module names, such as "blocks.*". The parameters of each match are
            gathered together. None means the repeated blocks of the model. Default: None.
        reshard_after_forward: Free the gathered parameters of a unit between the forward and backward
            pass (ZeRO-3). If False, they stay gathered until backward has used them (ZeRO-2).
            Default: True.
        param_dtype: The dtype in which parameters are gathered and used: "fp32", "bf16" or "fp16".
            None means the dtype of `Step(precision=…)`: 16 bits for "bf16" and "fp16", the dtype of the
            parameters for "fp32" and in a custom training loop. Default: None.
        reduce_dtype: The dtype in which gradients are summed if parameters are gathered in another
            dtype than their own: "fp32", "bf16" or "fp16". Default: "fp32".
        accumulate: When to sum gradients over ranks. "sharded" sums after each micro-batch, so that a
            rank keeps only a shard of them. "whole" sums after the last micro-batch, which moves fewer
            bytes. Default: "sharded".
        cpu_offload: Keep the shards in CPU memory. CUDA only. Default: False.

    Raises:
        StepError: If an option has a value that is not listed, or a unit has shared parameters,
            complex parameters or parameters of several dtypes.
        LayoutError: If the layout has no axis over which to shard.

    Examples:
        >>> strategy = shoal.FSDP(modules=("blocks.*",), param_dtype="bf16")
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate", "shard")
    defers: ClassVar[bool] = True

    modules: Sequence[str] | None = None
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str = "fp32"
    accumulate: str = "sharded"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        chosen: dict[str, tuple[str | None, tuple[str | None, ...]]] = {
            "param_dtype": (self.param_dtype, (None, *DTYPES)),
            "reduce_dtype": (self.reduce_dtype, (*DTYPES,)),
            "accumulate": (self.accumulate, ("sharded", "whole")),
        }
        for option, (value, allowed) in chosen.items():
            check_choice(StepError, "shoal.FSDP", option, value, allowed)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Shard the model in place. In a world of size 1, only move it to the device."""
        if self.cpu_offload and world.device.type == "cpu":
            raise StepError(
                given="shoal.FSDP(cpu_offload=True) on the CPU",
                found="the shards are in CPU memory already",
                fix="leave cpu_offload out",
            )
        units = find_units(model, self.modules)
        _check_parameters(model, units)
        if world.size == 1:
            return local_engine(model.to(world.device), world)
        if all(world.layout.degree(axis) == 1 for axis in ("shard", "expert", "context")):
            raise LayoutError(
                given=f"shoal.FSDP() with layout='{world.layout}'",
                found="the layout has no axis over which parameters could be sharded",
                fix="call shoal.init(layout='shard=-1'), or 'replicate=2,shard=-1' to keep two copies",
            )
        from shoal.strategies.fsdp.engine import fsdp_engine  # imports DTensor, which takes 0.5 s

        precision = self.divide(model, units, world)
        if any(p.is_meta for p in model.parameters()):
            from shoal.strategies.deferred_init import allocate

            allocate(model, torch.device("cpu") if self.cpu_offload else world.device)
        whole, reshard = self.accumulate == "whole", self.reshard_after_forward
        engine = fsdp_engine(model, world, precision, whole=whole, reshard=reshard)
        engine.gathered_dtype = self._gathered_dtype
        return engine

    @property
    def _gathered_dtype(self) -> torch.dtype | None:
        return None if self.param_dtype is None else DTYPES[self.param_dtype]

    def divide(self, module: nn.Module, units: Sequence[nn.Module], world: World) -> GatheredPrecision:
        """Shard the parameters of `module` in place; each unit is gathered separately. See `apply`."""
        from shoal.strategies.fsdp.engine import divide

        return divide(
            module,
            units,
            world,
            reshard_after_forward=self.reshard_after_forward,
            param_dtype=self._gathered_dtype,
            reduce_dtype=DTYPES[self.reduce_dtype],
            cpu_offload=self.cpu_offload,
        )


def _check_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise StepError for parameters that FSDP2 shards wrongly: shared, complex or of mixed dtypes."""
    inside = {id(part): number for number, unit in enumerate(units) for part in unit.modules()}
    owners: dict[int, tuple[int, str]] = {}
    kinds: dict[int, tuple[torch.dtype, str]] = {}
    for prefix, part in model.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(prefix, recurse=False, remove_duplicate=False):
            unit = inside.get(id(part), -1)
            owner, other = owners.setdefault(id(parameter), (unit, name))
            dtype, typical = kinds.setdefault(unit, (parameter.dtype, name))
            if parameter.is_complex():
                found = f"{name} is complex, and FSDP2 can only sum real numbers"
                fix = (
                    "store nn.Parameter(torch.view_as_real(w)), and call "
                    "torch.view_as_complex(self.w) in forward"
                )
            elif owner != unit:
                found = (
                    f"{other} and {name} are one parameter in two units, gathered at different times"
                )
                fix = "choose units that hold both or neither; shoal.FSDP(modules=()) makes one unit"
            elif dtype != parameter.dtype:
                found = (
                    f"{typical} is {dtype}, and {name} is {parameter.dtype}; a unit has a single dtype"
                )
                fix = "call model.to(torch.float32), or pass modules=(…) that separate them"
            else:
                continue
            raise StepError(
                given=f"shoal.FSDP() around {type(model).__name__}",
                found=found.replace("torch.", ""),
                fix=fix,
            )
