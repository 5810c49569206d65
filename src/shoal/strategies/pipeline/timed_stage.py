"""Timing of torch's pipelining on the timeline, and the micro-batch that a stage processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from shoal.data.batch import Batch
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import Drawing, Draws, MicroBatch
from shoal.distributed.world import World
from shoal.strategies.comm_timing import neighbours_awaited, tensors_awaited
from shoal.telemetry.step_timer import FORWARD, Timeline


class StagedBatch(NamedTuple):
    """The micro-batches of a batch, padded to the same number of rows, and their random draws."""

    micros: Sequence[MicroBatch]
    rows: int
    draws: Sequence[Draws | None]


def staged(batch: Batch, *, keyed: bool = True) -> StagedBatch:
    """Return a batch for the stages of a pipeline. Without `keyed`, they draw by rank."""
    # Of this batch only: a run that resumes here does not know the batches before.
    rows = max(micro.samples for micro in batch.micros)
    # The rows of the padding have the positions after the samples; the loss does not get them.
    draws = [
        Draws(micro._replace(samples=rows), batch.seed) if keyed else None for micro in batch.micros
    ]
    return StagedBatch(batch.micros, rows, draws)


class MarkedStage(PipelineStage):
    """Stage whose forward passes are marked. The rest of a schedule counts as backward or waiting.

    `current` returns the batch that the schedule runs.
    """

    def __init__(
        self,
        world: World,
        current: Callable[[], StagedBatch],
        *arguments: Any,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._timeline = world.timeline
        self._coupled = world.service(CoupledStep)
        self._current = current

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Run one forward and mark its time."""
        micros, rows, draws = self._current()
        with (
            self._timeline.within(FORWARD),
            self._coupled.processing(micros[fwd_chunk_id], rows),
            Drawing(draws[fwd_chunk_id]),
        ):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Run one backward pass, which may recompute a forward pass."""
        micros, rows, _ = self._current()
        with self._coupled.processing(micros[bwd_chunk_id], rows):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of the inputs, which have to be contiguous.

        If backward runs in two parts, those of `torch.cat` are views of one gradient.
        """
        operations: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        for operation in operations:
            operation.tensor = operation.tensor.contiguous()
        return operations


@contextmanager
def schedule_marked(timeline: Timeline, *, tensors: bool) -> Iterator[None]:
    """Mark the waits of a schedule for adjacent stages and, with `tensors`, those of DTensors."""
    with neighbours_awaited(timeline):
        if not tensors:
            yield
            return
        with tensors_awaited(timeline):
            yield
