"""Stages for torch's pipelining: their modules, their timing, and the micro-batch that they process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shoal._torch.autograd import is_view
from shoal._torch.dispatch import TreeSpec, tree_flatten, tree_unflatten
from shoal._torch.modules import call_uncompiled
from shoal.data.batch import Batch
from shoal.data.coupling.step import CoupledStep
from shoal.data.micro import Drawing, Draws, MicroBatch
from shoal.distributed.world import World
from shoal.strategies.comm_timing import neighbours_awaited, tensors_awaited
from shoal.strategies.local import mixed
from shoal.strategies.partition.inputs import Inputs
from shoal.strategies.partition.own_stages import DrawCounts
from shoal.strategies.partition.stages import Stage
from shoal.telemetry.step_timer import FORWARD, Timeline
from shoal.util.errors import StepError

_TENSOR = object()
"""Placeholder of a tensor among the leaves of an output, which may contain None."""


class StageModule(nn.Module):
    """Module for torch's pipelining that runs a stage: tensors in, tensors out."""

    def __init__(self, stage: Stage, world: World, counts: DrawCounts, *, last: bool) -> None:
        super().__init__()
        self.body = stage.body
        self.autocast: torch.dtype | None = None
        self.inputs: Sequence[Inputs] = []
        """Inputs of the model per micro-batch. torch would compute gradients of passed arguments."""
        self._needed = stage.needed
        self._counts = counts
        self._last = last
        self._device = world.device
        self._spec: TreeSpec
        self._others: list[Any] = []
        self._alone: Callable[[], Any] | None = None

    def run_alone(self, call: Callable[[], Any]) -> Any:
        """Run `call` within the hooks of this stage, which gather its parameters."""
        self._alone = call
        try:
            return call_uncompiled(self, micro=0)
        finally:
            self._alone = None

    def forward(self, *received: Tensor, micro: int) -> Any:
        """Run the stage on the received tensors and the inputs of the model that it needs."""
        if self._alone is not None:
            return self._alone()
        inputs, values = self.inputs[micro], self._counts.taken_from(received)
        with mixed(self._device, self.autocast):
            output = self.body(*values, *(inputs[name] for name in self._needed))
        if self._last:
            leaves, self._spec = tree_flatten(output)
            self._others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return self._counts.added_to([_sendable(value, values) for value in output])

    def whole(self, tensors: Sequence[Tensor] | Tensor) -> Any:
        """Return the output of the model, given its tensors."""
        rest = iter((tensors,) if isinstance(tensors, Tensor) else tensors)
        leaves = [next(rest) if other is _TENSOR else other for other in self._others]
        return tree_unflatten(leaves, self._spec)


def _sendable(value: object, received: Sequence[Tensor]) -> Tensor:
    if not isinstance(value, Tensor):
        raise StepError(
            given="a pipeline whose stages exchange computed values",
            found=f"one stage computes a {type(value).__name__} that a later one needs, and only "
            "tensors can be sent",
            fix="compute it in the later stage too, or choose other split points",
        )
    if torch.is_grad_enabled() and learns(value.dtype) and not value.requires_grad:
        return value.detach().contiguous().requires_grad_()  # frozen stage: torch sends gradients
    # torch detaches sent tensors in place: clone views and tensors that only pass through.
    shared = is_view(value) or any(value is tensor for tensor in received)
    return value.clone() if shared else value.contiguous()


def learns(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype have gradients to send back."""
    return dtype.is_floating_point or dtype.is_complex


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
