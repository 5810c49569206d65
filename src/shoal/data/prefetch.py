"""Moving batches to the device, one ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.timeline import TRANSFER, Timeline

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
    items: Iterable[tuple[Item, list[Any]]], device: torch.device, timeline: Timeline
) -> Iterator[tuple[Item, list[Any]]]:
    """The items with their values on `device`.

    On CUDA the copy of the next item runs on a stream of its own while the current one is computed
    on; copies overlap only from pinned memory. On the CPU the items pass as they are. What the
    computation waits for is marked on the `timeline`.
    """
    if device.type != "cuda":
        yield from items
        return
    stream = torch.cuda.Stream(device)
    ready: tuple[Item, list[Any]] | None = None
    for item, values in items:
        with timeline.within(TRANSFER), torch.cuda.stream(stream):
            upcoming = (item, [move(value, device) for value in values])
        if ready is not None:
            yield ready
        with timeline.within(TRANSFER):
            _hand_over(upcoming[1], stream)
        ready = upcoming
    if ready is not None:
        yield ready


def _hand_over(value: Any, stream: torch.cuda.Stream) -> None:
    """Let the current stream wait for the copies, and keep their memory until it is done with it."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for tensor in tensors_in(value):
        if tensor.is_cuda:
            tensor.record_stream(current)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: through tuples, lists, mappings and the attributes of objects that
    move themselves (a graph batch of another library keeps stores within stores)."""
    waiting, met = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in met:
            continue
        met.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple | list):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
        if not isinstance(item, Tensor | type | ModuleType) and hasattr(item, "__dict__"):
            waiting += vars(item).values()
