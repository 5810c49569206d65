"""Prefetching of batches to the device, one ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from shoal.distributed.to_device import move, tensors_in
from shoal.telemetry.step_timer import TRANSFER, Timeline
from shoal.util.accelerator import is_accelerator, streams

Item = TypeVar("Item")


def on_device(
    items: Iterable[tuple[Item, list[Any]]], device: torch.device, timeline: Timeline
) -> Iterator[tuple[Item, list[Any]]]:
    """Yield the items with their values on `device`.

    The copy of the next item runs on a separate stream during the computation on the current one;
    copies overlap only from pinned memory. A device without streams copies each item when it is due,
    and on the CPU the items pass unchanged. The `timeline` records the waits of the computation.
    """
    if not is_accelerator(device):
        yield from items
        return
    module = streams(device)
    if module is None:
        for item, values in items:
            with timeline.within(TRANSFER):
                moved = [move(value, device) for value in values]
            yield item, moved
        return
    stream = module.Stream(device)
    ready: tuple[Item, list[Any]] | None = None
    for item, values in items:
        with timeline.within(TRANSFER), module.stream(stream):
            upcoming = (item, [move(value, device) for value in values])
        if ready is not None:
            yield ready
        with timeline.within(TRANSFER):
            current = module.current_stream(device)
            current.wait_stream(stream)
            for tensor in tensors_in(upcoming[1]):
                if tensor.device.type == device.type:
                    tensor.record_stream(current)  # its memory is kept until that is done with it
        ready = upcoming
    if ready is not None:
        yield ready
