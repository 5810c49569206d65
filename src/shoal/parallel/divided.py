"""What tensor parallelism does with DTensor: layers divided, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shoal.errors import StepError
from shoal.parallel.local import LocalEngine
from shoal.parallel.mesh import MeshEngine, divide_alike, summing_group
from shoal.shares import is_divided
from shoal.world import World

STYLES: dict[str, Any] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def divide(model: nn.Module, layers: Mapping[str, str], world: World) -> None:
    """Divide `layers`, names with their ways, over the axis `tensor`; what was tied stays tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    styles: dict[str, ParallelStyle] = {name: STYLES[way]() for name, way in layers.items()}
    parallelize_module(model, world.mesh["tensor"], styles)
    for first, *others in names.values():
        for other in others:
            _tie(model, first, other)


def _tie(model: nn.Module, first: str, other: str) -> None:
    one, two = model.get_parameter(first), model.get_parameter(other)
    if _placements(one) != _placements(two):
        raise StepError(
            given=f"shoal.Tensor(plan=…) around {type(model).__name__}",
            found=f"{first} and {other} are one parameter, and the plan divides them differently",
            fix='an Embedding as "vocabulary" and the Linear tied to it as "head" are divided alike',
        )
    owner, _, attribute = other.rpartition(".")
    setattr(model.get_submodule(owner), attribute, one)


def _placements(tensor: Tensor) -> object:
    return tuple(tensor.placements) if is_divided(tensor) else None


class TensorEngine(MeshEngine, LocalEngine):
    """Sums gradients over the data ranks after the last micro-batch, each with its own peers."""

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        self._summing = summing_group(world)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply, step, clear; StepError where torch would mix divided and whole parameters."""
        for group in optimizer.param_groups:
            at_once = [name for name in ("fused", "foreach") if group.get(name)]
            if at_once and len(set(map(is_divided, group["params"]))) > 1:
                self.discard()
                raise StepError(
                    given=f"{type(optimizer).__name__}(…, {at_once[0]}=True) with shoal.Tensor()",
                    found="it updates all parameters at once, and only some of them are divided; they "
                    "were not touched",
                    fix=f"leave {at_once[0]} out, or give it two groups: the layers of the plan, and "
                    "the others",
                )
        super().update(optimizer, factor)

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        super()._differentiate(loss, seed, last=last)
        if last:
            for parameter in self.parameters:
                divide_alike(parameter)
        if last and self._summing is not None:
            with torch.no_grad():
                works = [
                    dist.all_reduce(g, group=self._summing, async_op=True) for g in self._gradients()
                ]
            for work in works:
                if work is not None:
                    work.wait()
