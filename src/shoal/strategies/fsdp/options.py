"""Parameters, gradients and moments divided over ranks: fully sharded data parallelism (FSDP2).

Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP). torch's `fully_shard` gathers the parameters
of one unit at a time and scatters its gradients; the engine here says what is summed and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.local import local_engine
from shoal.strategies.module_patterns import find_units
from shoal.util.errors import LayoutError, StepError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Each rank keeps a share of every parameter, its gradient and its moments (FSDP2, HSDP).

    On the axis `shard` of the layout; with `replicate` besides, shares are kept that many times and
    gradients are summed over both (HSDP). `modules` are the modules whose parameters are gathered at
    once: patterns of names such as "blocks.*", or None for the repeated blocks of the model.
    `reshard_after_forward` frees a unit's parameters between forward and backward (ZeRO-3); without
    it they stay gathered until the backward has used them (ZeRO-2). `param_dtype` is the dtype in
    which parameters are gathered and computed with, "bf16" or "fp16" (default: their own),
    `reduce_dtype` the one in which gradients are summed. `accumulate` is "sharded" to sum gradients
    over ranks after each micro-batch, which keeps only a share of them, or "whole" to do so after the
    last one, which moves fewer bytes. `cpu_offload` keeps the shares in the memory of the CPU (CUDA
    only).

    `parallelize(Model, world, FSDP())`, with a function that makes the model instead of the model,
    never has the whole of it in memory; it gets the same values.
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
            if value not in allowed:
                raise StepError(
                    given=f"shoal.FSDP({option}={value!r})",
                    found=f"it is one of {', '.join(map(repr, allowed))}",
                    fix="shoal.FSDP(param_dtype='bf16', reduce_dtype='fp32'), or leave it out",
                )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Divide the model in place; in a world of one there is nothing to divide."""
        if self.cpu_offload and world.device.type == "cpu":
            raise StepError(
                given="shoal.FSDP(cpu_offload=True) on the CPU",
                found="the shares are in its memory already",
                fix="leave cpu_offload out",
            )
        units = find_units(model, self.modules)
        _check_parameters(model, units)
        if world.size == 1:
            return local_engine(model.to(world.device), world)
        if world.layout.degree("shard") * world.layout.degree("context") == 1:
            raise LayoutError(
                given=f"shoal.FSDP() with layout='{world.layout}'",
                found="no axis over which parameters could be divided",
                fix="shoal.init(layout='shard=-1'), or 'replicate=2,shard=-1' to keep two copies",
            )
        from shoal.strategies.fsdp.engine import fsdp_engine  # which brings DTensor and half a second

        self.divide(model, units, world)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device="cpu" if self.cpu_offload else world.device)
        whole, reshard = self.accumulate == "whole", self.reshard_after_forward
        return fsdp_engine(model, world, whole=whole, reshard=reshard)

    def divide(self, module: nn.Module, units: Sequence[nn.Module], world: World) -> None:
        """Divide the parameters of `module` in place, gathered unit by unit; see `apply`."""
        from shoal.strategies.fsdp.engine import divide

        divide(
            module,
            units,
            world,
            reshard_after_forward=self.reshard_after_forward,
            param_dtype=None if self.param_dtype is None else DTYPES[self.param_dtype],
            reduce_dtype=DTYPES[self.reduce_dtype],
            cpu_offload=self.cpu_offload,
        )


def _check_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise StepError for what FSDP2 divides wrongly: shared, complex or mixed parameters."""
    inside = {id(part): number for number, unit in enumerate(units) for part in unit.modules()}
    owners: dict[int, tuple[int, str]] = {}
    kinds: dict[int, tuple[torch.dtype, str]] = {}
    for prefix, part in model.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(prefix, recurse=False, remove_duplicate=False):
            unit = inside.get(id(part), -1)
            owner, other = owners.setdefault(id(parameter), (unit, name))
            dtype, typical = kinds.setdefault(unit, (parameter.dtype, name))
            if parameter.is_complex():
                found = f"{name} is complex, and FSDP2 sums real numbers"
                fix = (
                    "nn.Parameter(torch.view_as_real(w)), and torch.view_as_complex(self.w) in forward"
                )
            elif owner != unit:
                found = (
                    f"{other} and {name} are one parameter of two units, gathered at different times"
                )
                fix = "units that hold both or neither: shoal.FSDP(modules=()) makes the model one unit"
            elif dtype != parameter.dtype:
                found = f"{typical} is {dtype} and {name} {parameter.dtype}; a unit has one dtype"
                fix = "model.to(torch.float32), or modules=(…) that separate them"
            else:
                continue
            raise StepError(
                given=f"shoal.FSDP() around {type(model).__name__}",
                found=found.replace("torch.", ""),
                fix=fix,
            )
