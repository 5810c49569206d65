"""Parameters, gradients and moments divided over ranks: fully sharded data parallelism (FSDP2).

Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP). torch's `fully_shard` gathers the parameters
of one unit at a time and scatters its gradients; the engine here says what is summed and when.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.engine import Engine
from shoal.errors import StepError
from shoal.parallel.local import LocalEngine, as_scalar
from shoal.parallel.units import find_units
from shoal.shares import share
from shoal.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Each rank keeps a share of every parameter, its gradient and its moments (FSDP2, HSDP).

    On the axis `shard` of the layout; with `replicate` besides, shares are kept that many times and
    gradients are summed over both (HSDP). `units` are the modules whose parameters are gathered at
    once: patterns of names such as "blocks.*", or None for the repeated blocks of the model. `reshard`
    frees a unit's parameters between forward and backward (ZeRO-3); without it they stay gathered
    until the backward has used them (ZeRO-2). `gather` is the dtype in which parameters are gathered
    and computed with, "bf16" or "fp16" (default: their own), `reduce` the one in which gradients are
    summed. `accumulate` is "sharded" to sum gradients over ranks after each micro-batch, which keeps
    only a share of them, or "whole" to do so after the last one, which moves fewer bytes. `offload`
    keeps the shares in the memory of the CPU (CUDA only).

    `parallelize(Model, world, FSDP())`, with a function that makes the model instead of the model,
    never has the whole of it in memory; it gets the same values.
    """

    axes: ClassVar[tuple[str, ...]] = ("replicate", "shard")
    defers: ClassVar[bool] = True

    units: Sequence[str] | None = None
    reshard: bool = True
    gather: str | None = None
    reduce: str = "fp32"
    accumulate: str = "sharded"
    offload: bool = False

    def __post_init__(self) -> None:
        chosen: dict[str, tuple[str | None, tuple[str | None, ...]]] = {
            "gather": (self.gather, (None, *DTYPES)),
            "reduce": (self.reduce, tuple(DTYPES)),
            "accumulate": (self.accumulate, ("sharded", "whole")),
        }
        for option, (value, allowed) in chosen.items():
            if value not in allowed:
                raise StepError(
                    given=f"shoal.FSDP({option}={value!r})",
                    found=f"it is one of {', '.join(map(repr, allowed))}",
                    fix="shoal.FSDP(gather='bf16', reduce='fp32'), or leave it out",
                )

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Divide the model in place; in a world of one there is nothing to divide."""
        if self.offload and world.device.type != "cuda":
            raise StepError(
                given="shoal.FSDP(offload=True) on the CPU",
                found="the shares are in its memory already",
                fix="leave offload out",
            )
        units = find_units(model, self.units)
        _check_parameters(model, units)
        if world.size == 1:
            return LocalEngine(model.to(world.device), world)
        axes = ("replicate", "shard") if world.layout.degree("replicate") > 1 else ("shard",)
        given = None if self.gather is None else DTYPES[self.gather]
        options: dict[str, Any] = {
            "mesh": world.mesh[axes],
            "reshard_after_forward": self.reshard,
            "mp_policy": MixedPrecisionPolicy(given, DTYPES[self.reduce] if given else None),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        for part in (*units, model):
            fully_shard(part, **options)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device="cpu" if self.offload else world.device)
        return FSDPEngine(model, world, self)


class FSDPEngine(LocalEngine):
    """Says when torch's FSDP2 sums gradients; the sums of loss, count and norm share one all-reduce."""

    def __init__(self, module: nn.Module, world: World, options: FSDP) -> None:
        super().__init__(module, world)
        self.options = options
        self._sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._sharded:
            # Sums over ranks, exactly: what they are divided by is known only afterwards.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self._unsummed = False

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Send rank 0's buffers to all: they follow each rank's own samples."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0, group=self.world.group)

    def compile(self, how: str) -> None:
        """Compile each unit; its parameters are gathered outside of what is compiled."""
        if how == "script":
            raise StepError(
                given="compile='script' with shoal.FSDP()",
                found="TorchScript can't call what gathers the parameters",
                fix="compile='inductor'",
            )
        for part in self._sharded[1:] or self._sharded:
            part.compile()

    def discard(self) -> None:
        """Drop the gradients, also those of a batch that was left in the middle."""
        super().discard()
        if self._unsummed:
            for part in self._sharded:
                _drop_unsummed(part)
            self._unsummed = False

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        root = self._sharded[0]
        summed = last or self.options.accumulate == "sharded"
        root.set_requires_gradient_sync(summed)
        root.set_is_last_backward(last)
        self._unsummed = not summed
        with self._others_aside():
            torch.autograd.backward([loss], [seed])

    @contextmanager
    def _others_aside(self) -> Iterator[None]:
        """Keep the gradients of other models: a loss of this one may run through them (a GAN's).

        FSDP's hooks see nothing of a backward that names its leaves.
        """
        others = [engine.module for engine in self.world.engines if engine is not self]
        kept = [(p, p.grad) for other in others for p in other.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _gradients(self) -> list[Tensor]:
        with torch.no_grad():
            return [share(p.grad) for p in self.parameters if p.grad is not None]

    def _sums(self, norm: Tensor) -> tuple[float, float, float]:
        zero = norm.new_zeros((), dtype=torch.float64)
        shown = [one for one in self._shown if one[2]] if self.speaks else []
        losses = sum((loss.to(zero) for loss, _, _ in shown), zero)
        counts = sum((as_scalar(count, zero) for _, count, _ in shown), zero)
        copies = self.world.size // self.world.layout.degree("shard")
        sums = torch.stack((losses, counts, norm.to(zero).square() / copies))
        loss_sum, count, squares = self.world.all_reduce(sums).tolist()
        return loss_sum, count, math.sqrt(squares)


def _drop_unsummed(part: FSDPModule) -> None:
    """Forget gradients that wait for the last micro-batch, for which FSDP2 has no call."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 knows one group
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _check_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse what FSDP2 would divide wrongly: parameters that units share, complex or mixed ones."""
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
                fix = "units that hold both or neither: shoal.FSDP(units=()) makes the model one unit"
            elif dtype != parameter.dtype:
                found = f"{typical} is {dtype} and {name} {parameter.dtype}; a unit has one dtype"
                fix = "model.to(torch.float32), or units=(…) that separate them"
            else:
                continue
            raise StepError(
                given=f"shoal.FSDP() around {type(model).__name__}",
                found=found.replace("torch.", ""),
                fix=fix,
            )
