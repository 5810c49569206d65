"""Sharded parameters that are used outside the forward pass of their unit or layer.

FSDP2 gathers parameters for the forward pass of a unit. All other code finds shards: methods of the
model, modules that are called one by one, and losses that use a weight.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shoal._torch.autograd import version
from shoal._torch.dispatch import tree_leaves, tree_map_only, without_overrides
from shoal._torch.fsdp import parameter_groups, waiting_for_sums
from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.dtensor import share

_VIEWS = tuple(getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag", "data"))
_OF_SHARDS = frozenset(
    (
        *("__deepcopy__", "__format__", "__get__", "__hash__", "__len__", "__reduce_ex__", "__repr__"),
        *("__iadd__", "__imul__", "__isub__", "__itruediv__", "__set__", "__setitem__", "backward"),
        *("data_ptr", "dim", "element_size", "get_device", "ndimension", "nelement", "numel", "size"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "storage_offset"),
        *("stride", "type", "untyped_storage"),
    )
)
"""Functions of a tensor that use no values, or change it."""
_COPIES = ("clone", "detach")
_PLANNED = ("tensor",)
"""The axes of a layer of a tensor-parallel plan."""
_WAIT = "_shoal_wait"


class ShardedParameter(DTensor):
    """A sharded parameter that torch's functions get gathered where code uses its values.

    Code does so in the forward pass and the loss of a micro-batch, and where it combines the parameter
    with plain tensors. Optimizers and checkpoints get a DTensor. The gradient of such a use is summed
    over ranks in backward, and torch adds it to the one that FSDP2 computes.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, with gathered parameters if it uses their values."""
        named = kwargs or {}
        if not _uses_values(function, args):  # hundreds in a step, such as p.grad
            with without_overrides():
                return function(*args, **named)
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        planned = any(map(_is_activation, tensors))
        plain = any(not isinstance(t, DTensor) for t in tensors)

        def gather(tensor: DTensor) -> Tensor:
            split = _axes(tensor) == _PLANNED  # its layer gets sharded activations
            if planned and (split or _is_activation(tensor)):
                return tensor
            used = plain or (not split and (planned or CURRENT_DRAWS.get() is not None))
            return _gathered(tensor, planned=planned) if used else tensor

        args, named = tree_map_only(DTensor, gather, (args, named))
        with without_overrides():
            result = function(*args, **named)
        if isinstance(result, DTensor) and not planned and _is_of_parameters(function, result):
            result.__class__ = cls
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Return a copy, with its own gradient."""
        with without_overrides():
            twin = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
            twin.grad = copy.deepcopy(self.grad, memo)
        found: Any = twin
        found.__class__ = ShardedParameter
        memo[id(self)] = found
        return cast(ShardedParameter, found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor."""
        with without_overrides():
            return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def gather_outside(part: FSDPModule) -> None:
    """Let code outside the forward pass of `part`, a unit of FSDP2, use its parameters."""
    for group in parameter_groups(part):
        for each in group.fsdp_params:
            setattr(each.sharded_param, _WAIT, waiting_for_sums(group))
            each.sharded_param.__class__ = ShardedParameter


def _uses_values(function: Any, args: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return function in _VIEWS
    if name in _OF_SHARDS or name.startswith("is_"):
        return False
    changes = name.endswith("_") and not name.endswith("__")
    changed = args[0] if changes and args else ()
    changed = changed if isinstance(changed, list | tuple) else (changed,)  # of foreach operations
    return not any(isinstance(each, DTensor) for each in changed)


def _axes(tensor: DTensor) -> tuple[str, ...] | None:
    return tensor.device_mesh.mesh_dim_names


def _is_activation(tensor: Tensor) -> bool:
    """Return whether a tensor is an activation between layers of a tensor-parallel plan."""
    return type(tensor) is DTensor and _axes(tensor) == _PLANNED


def _is_of_parameters(function: Any, result: Tensor) -> bool:
    """Return whether a loss may use `result` as it uses parameters: a copy, or a function of them."""
    running = result.requires_grad or CURRENT_DRAWS.get() is not None
    return running or getattr(function, "__name__", "") in _COPIES


def _gathered(tensor: DTensor, *, planned: bool) -> Tensor:
    """Return the full tensor; with `planned`, a DTensor that is still sharded over the `tensor` axis.

    All uses in a micro-batch share it, so that a loop over a module needs its memory once.
    """
    draws = CURRENT_DRAWS.get()
    key = (id(tensor), version(share(tensor)), torch.is_grad_enabled(), planned)
    if draws is None or key not in draws.gathered:
        made = _gather(tensor, planned)
        if draws is None:
            return made
        draws.gathered[key] = (tensor, made)
    found: Tensor = draws.gathered[key][1]
    return found


def _gather(tensor: DTensor, planned: bool) -> Tensor:
    mesh = tensor.device_mesh
    axes = list(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
    kept = [placement for axis, placement in axes if planned and axis == "tensor"]
    wanted: list[Placement] = [Replicate() for _ in axes[len(kept) :]]
    # Ranks have other samples, except those of a tensor-parallel group, whose gradients are the same.
    seen = [Replicate() if axis == "tensor" else Partial() for axis, _ in axes[: len(wanted)]]
    moved = tensor.redistribute(placements=[*wanted, *kept])
    if moved.requires_grad and hasattr(tensor, _WAIT):
        moved.register_hook(getattr(tensor, _WAIT))
    local = moved.to_local(grad_placements=[*seen, *kept])
    if not kept:
        return local
    return DTensor.from_local(
        local, mesh["tensor"], kept, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
