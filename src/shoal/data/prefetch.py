"""Prefetching of batches to the device, one ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from shoal.distributed.to_device import move, tensors_in
from shoal.telemetry.step_timer import TRANSFER, Timeline

Item = TypeVar("Item")


def on_device(
    items: Iterable[tuple[Item, list[Any]]], device: torch.device, timeline: Timeline
) -> Iterator[tuple[Item, list[Any]]]:
    """Yield the items with their values on `device`.

    On CUDA the copy of the next item runs on a separate stream during the computation on the current
    one; copies overlap only from pinned memory. On the CPU the items pass unchanged. The `timeline`
    records the waits of the computation.
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
