"""Search for tensors in nested values, and their transfer to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import autograd


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. Only a copy to the CPU is waited for, since the CPU reads it."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def move(
    value: Any, device: torch.device, each: Callable[[Tensor, torch.device], Tensor] = send
) -> Any:
    """Return `value` with every tensor in it on `device`: in tuples, lists, mappings, objects with
    `.to`.

    `each` moves one tensor. Values without tensors to move are returned as the same object.
    """
    if isinstance(value, Tensor):
        return each(value, device)
    if isinstance(value, nn.Module | type):
        return value
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple | list):
        items = [move(item, device, each) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return _move_mapping(value, device, each)
    return value


def _move_mapping(
    value: Mapping[Any, Any], device: torch.device, each: Callable[[Tensor, torch.device], Tensor]
) -> Mapping[Any, Any]:
    items = {key: move(item, device, each) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if not isinstance(value, MutableMapping):
        return items
    moved = copy.copy(value)  # mappings of other libraries may have attributes
    for key, item in items.items():
        moved[key] = item
    return moved


def device_in(value: Any) -> torch.device | None:
    """Return the device of the first tensor in `value`; None if there is none."""
    return next((tensor.device for tensor in tensors_in(value)), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value; see `named_tensors`."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, and the code that gets each of them from the variable `name`.

    They are in tuples, lists, mappings and the attributes of objects that move themselves (a graph
    batch of another library has nested stores).
    """
    waiting, met = [(name, value)], set()
    while waiting:
        name, item = waiting.pop(0)
        if id(item) in met:
            continue
        met.add(id(item))
        if isinstance(item, Tensor):
            yield name, item
        elif isinstance(item, tuple | list):
            waiting += [(f"{name}[{number}]", each) for number, each in enumerate(item)]
        elif isinstance(item, Mapping):
            waiting += [(f"{name}[{key!r}]", each) for key, each in item.items()]
        if not isinstance(item, Tensor | type | ModuleType) and hasattr(item, "__dict__"):
            waiting += [(f"{name}.{key}", each) for key, each in vars(item).items()]


@contextmanager
def values_kept(value: Any) -> Iterator[None]:
    """Restore the tensors in `value` after the block, even if a model works in place."""
    kept = [(tensor, version(tensor), tensor.clone()) for tensor in tensors_in(value)]
    shapes = [tensor.shape for tensor, _, _ in kept]
    try:
        yield
    finally:
        for (tensor, before, values), shape in zip(kept, shapes, strict=True):
            if before is None or version(tensor) != before:
                with torch.inference_mode(before is None), torch.no_grad():
                    if tensor.shape != shape:  # as unsqueeze_ changes it
                        tensor.resize_(shape)
                    tensor.copy_(values)


def version(tensor: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None for inference tensors, which have no
    count.
    """
    return None if tensor.is_inference() else autograd.version(tensor)
