"""Devices that are not there: tensors on the CPU which say they are elsewhere, and moves recorded.

Inside of `pretended()` a tensor that is moved to `torch.device("cpu", N)` becomes one that says it is
there. As on real devices, an operation takes tensors of one device only, and `.to` of another one makes
a copy. Values, gradients and autograd are torch's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

ASK = torch.ops.prim.device.default
COPY = torch.ops.aten._to_copy.default
FILL = torch.ops.aten.copy_.default


class Move(NamedTuple):
    """A tensor that went from one device to another; the CPU itself has no number."""

    source: int | None
    target: int | None
    shape: tuple[int, ...]
    backward: bool


class Elsewhere(Tensor):
    """A tensor that says it is on a device."""

    held: Tensor
    number: int

    @staticmethod
    def __new__(cls, inner: Tensor, number: int) -> Elsewhere:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cpu"),
            dispatch_device=True,
        )
        assert isinstance(made, Elsewhere)
        return made

    def __init__(self, inner: Tensor, number: int) -> None:
        self.held, self.number = inner, number

    # What `Module.to` asks for: parameters are then swapped, and stay the objects that they are.
    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["held"], self.number

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], number: int, *_: Any) -> Elsewhere:
        return Elsewhere(inner["held"], number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # which torch refuses for all subclasses
            return plain(args[0]).tolist()
        with torch._C.DisableTorchFunctionSubclass():  # what leaves the devices is a plain tensor
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a method in torch's stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """While it is entered, devices `cpu:N` are there; `moves` are those made between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _run(func, args, kwargs or {})
        if func is COPY and _number(args[0]) != _number(made):
            backward = torch._C._current_autograd_node() is not None
            self.moves.append(Move(_number(args[0]), _number(made), tuple(made.shape), backward))
        return made


def plain(tensor: Tensor) -> Tensor:
    """The values of a tensor, wherever it says it is."""
    found = tensor.detach()
    return found.held if isinstance(found, Elsewhere) else found


def _number(tensor: object) -> int | None:
    return tensor.number if isinstance(tensor, Elsewhere) else None


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is ASK:
        return torch.device("cpu", args[0].number)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    numbers = {_number(t) for t in tensors if t.dim() or isinstance(t, Elsewhere)}
    if len(numbers) > 1 and func is not FILL:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {numbers}")
    number = _number(args[0]) if func is FILL else next(iter(numbers), None)
    inner, named = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    wanted = named.get("device")
    if isinstance(wanted, torch.device) and wanted.type == "cpu":
        number = wanted.index
        named["device"] = torch.device("cpu")
    made = func(*inner, **named)
    if number is None:
        return made
    made = tree_map(lambda x: Elsewhere(x, number) if isinstance(x, Tensor) else x, made)
    return return_and_correct_aliasing(func, args, kwargs, made)
