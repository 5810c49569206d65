"""Timing of torch's pipelining on the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from shoal.strategies.comm_timing import neighbours_awaited, tensors_awaited
from shoal.telemetry.step_timer import FORWARD, Timeline


class MarkedStage(PipelineStage):
    """Stage whose forwards are marked. The rest of a schedule counts as backward or waiting."""

    def __init__(self, timeline: Timeline, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timeline = timeline

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        """Run one forward and mark its time."""
        with self._timeline.within(FORWARD):
            return super().forward_one_chunk(*arguments, **named)


@contextmanager
def schedule_marked(timeline: Timeline, *, tensors: bool) -> Iterator[None]:
    """Mark the waits of a schedule for adjacent stages and, with `tensors`, those of DTensors."""
    with neighbours_awaited(timeline):
        if not tensors:
            yield
            return
        with tensors_awaited(timeline):
            yield
