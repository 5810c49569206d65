"""torch's pipelining, marked on the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from shoal.strategies.comm_timing import neighbours_awaited, tensors_awaited
from shoal.telemetry.step_timer import FORWARD, Timeline


class MarkedStage(PipelineStage):
    """A stage whose forwards are marked; all else that a schedule does is backward, or waits."""

    def __init__(self, timeline: Timeline, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timeline = timeline

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        """As torch has it."""
        with self._timeline.within(FORWARD):
            return super().forward_one_chunk(*arguments, **named)


@contextmanager
def schedule_marked(timeline: Timeline, *, tensors: bool) -> Iterator[None]:
    """Inside, where a schedule waits for neighbouring stages, and with `tensors` where DTensors do."""
    with neighbours_awaited(timeline):
        if not tensors:
            yield
            return
        with tensors_awaited(timeline):
            yield
