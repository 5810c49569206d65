"""Sharded parameters that are used outside the forward pass of their unit or layer.

FSDP2 gathers parameters for the forward pass of a unit. All other code finds shards: methods of the
model, modules that are called one by one, and losses that use a weight.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shoal._torch.autograd import COMPILER_ASKS, is_view, version
from shoal._torch.dispatch import tree_leaves, tree_map_only, without_overrides
from shoal._torch.fsdp import gathered_parameter, parameter_groups, waiting_for_sums
from shoal.data.micro import CURRENT_DRAWS
from shoal.strategies.dtensor import share, shared_like
from shoal.util.errors import StepError

_VIEWS = tuple(getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag", "data"))
_GRAD = vars(Tensor.__base__)["grad"].__get__
_SET_DATA = vars(Tensor.__base__)["data"].__set__
_OF_SHARDS = frozenset(
    (
        *("__deepcopy__", "__delete__", "__get__", "__hash__", "__len__", "__reduce_ex__"),
        *("__repr__", "backward", "data_ptr", "detach_", "dim", "element_size", "get_device"),
        *("ndimension", "nelement", "numel", "register_post_accumulate_grad_hook", "requires_grad_"),
        *("retain_grad", "share_memory_", "size", "storage_offset", "stride", "type"),
        *("untyped_storage", *COMPILER_ASKS),
    )
)
"""Functions of a tensor that use no values."""
_SETS = ("__set__", "register_hook")
_IN_PLACE = re.compile(r"__setitem__|__i(?!nt__|ndex__|nvert__|ter__)\w+__|.*[^_]_")
_ELEMENTWISE = frozenset(
    (
        *("__iadd__", "__imul__", "__ipow__", "__isub__", "__itruediv__", "abs_", "add_", "addcdiv_"),
        *("addcmul_", "clamp_", "clamp_max_", "clamp_min_", "constant_", "copy_", "div_", "exp_"),
        *("fill_", "lerp_", "log_", "masked_fill_", "mul_", "nan_to_num_", "neg_", "pow_", "round_"),
        *("sigmoid_", "sign_", "sqrt_", "sub_", "tanh_", "zero_"),
    )
)
"""Functions that change each shard as they change the whole tensor."""
_RANDOM = re.compile("rand|bernoulli|dropout|multinomial|normal$|poisson")
_PLANNED = ("tensor",)
"""The axes of a layer of a tensor-parallel plan."""
_WAIT = "_shoal_wait"
_STEP: ContextVar[FrameType | None] = ContextVar("the last step of an optimizer", default=None)


class ShardedParameter(DTensor):
    """A sharded parameter, its gradient, or a result of them, of which code gets the values.

    In the forward pass and the loss of a micro-batch, and where code combines it with plain tensors,
    torch's functions get the gathered tensor. Elsewhere, they get a DTensor, and the gathered one if
    torch lacks the function for DTensors or if it returns no tensor. Changes in place raise StepError
    unless they are elementwise. Optimizers and checkpoints get a DTensor. The gradient of a use is
    summed over ranks in backward, and torch adds it to the one that FSDP2 computes.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, with gathered parameters if it uses their values."""
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        if not _uses_values(function, name):  # hundreds in a step, such as p.grad
            with without_overrides():
                result = function(*args, **named)
            if function == _GRAD and isinstance(result, DTensor):
                result.__class__ = DTensor if _in_step() else cls
            return result
        step = _in_step()
        changed = _changed(name, args, named)
        if changed and not step:
            return _change(function, name, args, named, changed)
        if changed or (step and name.startswith("_foreach_")):
            with without_overrides():
                return function(*args, **named)
        if name == "__iter__":
            return iter(args[0].unbind())
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        planned = any(map(_is_activation, tensors))
        plain = any(not isinstance(t, DTensor) for t in tensors)
        if not step and not plain and CURRENT_DRAWS.get() is None and _RANDOM.search(name):
            raise _refused(name)
        parts: list[DTensor] = []

        def gather(tensor: DTensor) -> Tensor:
            split = _axes(tensor) == _PLANNED  # its layer gets sharded activations
            if planned and (split or _is_activation(tensor)):
                return tensor
            if plain or (not split and (planned or not (step or CURRENT_DRAWS.get() is None))):
                return _gathered(tensor, planned=planned)
            parts.append(tensor)
            return tensor

        def call(gather: Callable[[DTensor], Tensor]) -> Any:
            given, by_name = tree_map_only(DTensor, gather, (args, named))
            with without_overrides():
                return function(*given, **by_name)

        if planned or step:
            return call(gather)
        result = None
        try:
            result = call(gather)
        except (NotImplementedError, RuntimeError, TypeError):  # torch lacks some for DTensors
            if not parts:
                raise
        if parts and not any(isinstance(t, Tensor) for t in tree_leaves(result)):  # of a shard
            result = call(partial(_gather, planned=False, alike=True))
            if any(isinstance(t, Tensor) and is_view(t) for t in tree_leaves(result)):
                raise _refused(name)
        return _adopted(result)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Return a copy, with its own gradient."""
        with without_overrides():
            twin: Any = self.detach().clone()
            if isinstance(self, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=self.requires_grad)
                twin.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = _adopted(twin)
        return cast(ShardedParameter, twin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor."""
        with without_overrides():
            return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def gather_outside(part: Any) -> None:
    """Let code outside the forward pass of `part`, a unit of FSDP2, use its parameters."""
    for group in parameter_groups(part):
        for each in group.fsdp_params:
            setattr(each.sharded_param, _WAIT, waiting_for_sums(group))
            each.sharded_param.__class__ = ShardedParameter
    part.register_forward_hook(_adopt_gathered)


def _adopt_gathered(part: Any, *_: object) -> None:
    """Let a loss use weights of a tensor-parallel plan that FSDP2 has gathered."""
    if not torch.compiler.is_compiling():
        _adopted([gathered_parameter(p) for g in parameter_groups(part) for p in g.fsdp_params])


def _uses_values(function: Any, name: str) -> bool:
    if name == "__get__":
        return function in _VIEWS
    return name not in _OF_SHARDS and (not name.startswith("is_") or name == "is_nonzero")


@cache
def _is_in_place(name: str) -> bool:
    return name in _SETS or bool(_IN_PLACE.fullmatch(name))


def _changed(name: str, args: Any, named: Any) -> list[Any] | tuple[Any, ...]:
    """Return the tensors that a function changes, if some of them are sharded."""
    found = named.get("out")
    if found is None and _is_in_place(name):
        found = args[0] if args else next(iter(named.values()))
    changed = found if isinstance(found, list | tuple) else (found,)
    return changed if any(isinstance(each, DTensor) for each in changed) else ()


def _change(function: Any, name: str, args: Any, named: Any, changed: Any) -> Any:
    """Call a function that changes each shard by itself, or raise StepError."""
    each = name.removeprefix("_foreach_")
    if each != name and hasattr(Tensor, each):  # lists may have sharded and plain tensors
        lists = (a if isinstance(a, list | tuple) else [a] * len(changed) for a in args)
        return [getattr(Tensor, each)(*row, **named) for row in zip(*lists, strict=True)]
    tensor = changed[0]
    if name == "register_hook" and hasattr(tensor, _WAIT):
        raise StepError(
            given="p.register_hook(…) on a parameter p of a model with shoal.FSDP()",
            found="FSDP sums gradients without calling the hooks of tensors",
            fix="p.register_post_accumulate_grad_hook(…), which can change p.grad",
        )
    if function == _SET_DATA and (args[1].shape, args[1].dtype) == (tensor.shape, tensor.dtype):
        with torch.no_grad():
            return tensor.copy_(args[1])
    with without_overrides():
        known = (name in _ELEMENTWISE and not is_view(tensor)) or name in _SETS
    if "out" in named or not known or function == _SET_DATA:
        raise _refused("p.data = …" if function == _SET_DATA else name)

    def alike(value: Tensor) -> Tensor:
        if isinstance(value, DTensor) or not value.dim():
            return value
        return shared_like(value.expand(tensor.shape), tensor)

    with without_overrides():
        args, named = tree_map_only(Tensor, alike, (args, named))
        return function(*args, **named)


def _refused(name: str) -> StepError:
    return StepError(
        given=f"{name} on a sharded parameter, its gradient, or a view of one",
        found="each rank has only a part of the tensor, and can't change or fill all of it",
        fix="do it before shoal.parallelize; or change full = p.full_tensor() in the same way on all "
        "ranks, and then call p.copy_(full) under torch.no_grad()",
    )


def _adopted(result: Any) -> Any:
    """Let functions of the sharded tensors in `result` get their values."""
    for each in tree_leaves(result):
        if isinstance(each, DTensor):
            each.__class__ = ShardedParameter
    return result


def _set_states(optimizer: Any, old: type, new: type) -> None:
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if type(value) is old:
                value.__class__ = new


def _before_step(optimizer: Any, *_: object) -> None:
    _set_states(optimizer, ShardedParameter, DTensor)
    _STEP.set(sys._getframe(1))


def _after_step(optimizer: Any, *_: object) -> None:
    _STEP.set(None)
    _set_states(optimizer, DTensor, ShardedParameter)


def _in_step() -> bool:
    """Return whether an optimizer is in a step. One that has raised an error is not."""
    step = _STEP.get()
    frame: FrameType | None = sys._getframe(1)
    while step is not None and frame is not None and frame is not step:
        frame = frame.f_back
    return step is not None and frame is step


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _axes(tensor: DTensor) -> tuple[str, ...] | None:
    return tensor.device_mesh.mesh_dim_names


def _is_activation(tensor: Tensor) -> bool:
    """Return whether a tensor is an activation between layers of a tensor-parallel plan."""
    return type(tensor) is DTensor and _axes(tensor) == _PLANNED


def _gathered(tensor: DTensor, *, planned: bool) -> Tensor:
    """Return the full tensor; with `planned`, a DTensor that is still sharded over the `tensor` axis.

    All uses in a micro-batch share it, so that a loop over a module needs its memory once.
    """
    draws = CURRENT_DRAWS.get()
    key = (id(tensor), version(share(tensor)), torch.is_grad_enabled(), planned)
    if draws is None or key not in draws.gathered:
        made = _gather(tensor, planned=planned)
        if draws is None:
            return made
        draws.gathered[key] = (tensor, made)
    found: Tensor = draws.gathered[key][1]
    return found


def _gather(tensor: DTensor, *, planned: bool, alike: bool = False) -> Tensor:
    mesh = tensor.device_mesh
    axes = list(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
    kept = [placement for axis, placement in axes if planned and axis == "tensor"]
    wanted: list[Placement] = [Replicate() for _ in axes[len(kept) :]]
    # Ranks have other samples, except those of a tensor-parallel group, whose gradients are the same.
    seen = [Replicate() if alike or axis == "tensor" else Partial() for axis, _ in axes[: len(wanted)]]
    moved = tensor.redistribute(placements=[*wanted, *kept])
    if moved.requires_grad and hasattr(tensor, _WAIT):
        moved.register_hook(getattr(tensor, _WAIT))
    local = moved.to_local(grad_placements=[*seen, *kept])
    if not kept:
        return local
    return DTensor.from_local(
        local, mesh["tensor"], kept, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
