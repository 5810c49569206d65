"""Updates of sharded parameters as plain tensors, for optimizers that can't use torch's DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal._torch.optimizers import step_without_hooks, twin_of
from shoal.strategies.dtensor import copy_share, is_divided, share, shared_like, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_Group: TypeAlias = "tuple[dict[str, Any], dict[DTensor, Tensor]]"
"""The options of a parameter group before a step, and the gradients of its sharded parameters."""


class SeparateUpdates:
    """Hooks of an optimizer that step on shards, or on whole parameters that are gathered one by one.

    The step itself finds no gradients of sharded parameters, and so updates only the others. The state
    of a sharded parameter stays sharded like it, if it has its shape, and is the same on all ranks
    otherwise.
    """

    def __init__(self, *, gathers: bool) -> None:
        self.gathers = gathers
        self._groups: list[_Group] = []

    def hide(self, optimizer: Optimizer, *_: object) -> None:
        """Take the gradients of sharded parameters away, before a step."""
        groups: list[_Group] = [
            (
                {key: value for key, value in group.items() if key != "params"},
                {p: p.grad for p in group["params"] if is_divided(p) and p.grad is not None},
            )
            for group in optimizer.param_groups
        ]
        if any(gradients for _options, gradients in groups):
            self._groups = groups
            for _options, gradients in groups:
                for parameter in gradients:
                    parameter.grad = None

    @torch.no_grad()
    def update(self, optimizer: Optimizer, *_: object) -> None:
        """Update these parameters and put their gradients back, after the step. Collective."""
        groups, self._groups = self._groups, []
        if self.gathers:
            for options, gradients in groups:
                for parameter, gradient in gradients.items():
                    self._step(optimizer, [(options, {parameter: gradient})])
        elif groups:
            self._step(optimizer, groups)
        for _options, gradients in groups:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _step(self, optimizer: Optimizer, groups: list[_Group]) -> None:
        plain: Callable[[Tensor], Tensor] = whole if self.gathers else share
        made: dict[DTensor, Tensor] = {}
        for _options, gradients in groups:
            for parameter, gradient in gradients.items():
                made[parameter] = nn.Parameter(plain(parameter.detach()))
                made[parameter].grad = plain(gradient)
        twin = twin_of(
            optimizer,
            [{**options, "params": [made[p] for p in gradients]} for options, gradients in groups],
            {p: tensors_of(optimizer.state[d], plain) for d, p in made.items() if d in optimizer.state},
        )
        step_without_hooks(twin)
        for parameter, own in made.items():
            if self.gathers:
                copy_share(own.detach(), parameter)
            if own in twin.state:
                optimizer.state[parameter] = tensors_of(twin.state[own], self._sharded(parameter, own))

    def _sharded(self, parameter: DTensor, own: Tensor) -> Callable[[Tensor], Tensor]:
        def sharded(value: Tensor) -> Tensor:
            if value.shape != own.shape:
                return value
            return shared_like(value, parameter) if self.gathers else wrapped(value, parameter)

        return sharded


def wrapped(shard: Tensor, like: DTensor) -> DTensor:
    """Return the DTensor whose shard on this rank is `shard`, with the shape of `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def tensors_of(tree: Any, each: Callable[[Tensor], Tensor]) -> Any:
    """Return a tree of dicts, lists and tuples with `each` of its tensors."""
    if isinstance(tree, Tensor):
        return each(tree)
    if isinstance(tree, dict):
        return {key: tensors_of(value, each) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(tensors_of(value, each) for value in tree)
    return tree
