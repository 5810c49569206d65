"""Timing of torch's pipelining on the timeline, and the micro-batch that a stage processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from shoal.data.coupled import CoupledStep
from shoal.data.micro import MicroBatch
from shoal.distributed.world import World
from shoal.strategies.comm_timing import neighbours_awaited, tensors_awaited
from shoal.telemetry.step_timer import FORWARD, Timeline


class MarkedStage(PipelineStage):
    """Stage whose forward passes are marked. The rest of a schedule counts as backward or waiting.

    `current` returns the micro-batches of the batch, and the number of rows to which they are padded.
    """

    def __init__(
        self,
        world: World,
        current: Callable[[], tuple[Sequence[MicroBatch], int]],
        *arguments: Any,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._timeline = world.timeline
        self._coupled = world.service(CoupledStep)
        self._current = current

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Run one forward and mark its time."""
        micros, rows = self._current()
        with self._timeline.within(FORWARD), self._coupled.processing(micros[fwd_chunk_id], rows):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Run one backward pass, which may recompute a forward pass."""
        micros, rows = self._current()
        with self._coupled.processing(micros[bwd_chunk_id], rows):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)


@contextmanager
def schedule_marked(timeline: Timeline, *, tensors: bool) -> Iterator[None]:
    """Mark the waits of a schedule for adjacent stages and, with `tensors`, those of DTensors."""
    with neighbours_awaited(timeline):
        if not tensors:
            yield
            return
        with tensors_awaited(timeline):
            yield
