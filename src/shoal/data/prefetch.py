"""Moving batches to the device, one ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`: tuples, lists, mappings, objects with `.to`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, Mapping) and not hasattr(value, "to"):
        return {key: move(item, device) for key, item in value.items()}
    return value.to(device) if hasattr(value, "to") else value


def on_device(
    items: Iterable[tuple[Item, list[Any]]], device: torch.device
) -> Iterator[tuple[Item, list[Any]]]:
    """The items with their values on `device`.

    On CUDA the copy of the next item runs on a stream of its own while the current one is computed
    on; copies overlap only from pinned memory. On the CPU the items pass as they are.
    """
    if device.type != "cuda":
        yield from items
        return
    stream = torch.cuda.Stream(device)
    ready: tuple[Item, list[Any]] | None = None
    for item, values in items:
        with torch.cuda.stream(stream):
            upcoming = (item, [move(value, device) for value in values])
        if ready is not None:
            yield ready
        _hand_over(upcoming[1], stream)
        ready = upcoming
    if ready is not None:
        yield ready


def _hand_over(value: Any, stream: torch.cuda.Stream) -> None:
    """Let the current stream wait for the copies, and keep their memory until it is done with it."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for tensor in _tensors(value):
        tensor.record_stream(current)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
