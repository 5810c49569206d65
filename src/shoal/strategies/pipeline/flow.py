"""A forward pass of one micro-batch through all stages, without a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.data.micro import Drawing, Draws
from shoal.distributed import objects
from shoal.distributed.world import World
from shoal.strategies.partition.inputs import Inputs
from shoal.strategies.pipeline.stage import StageModule
from shoal.util.errors import ShoalError, StepError

Form = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of tensors."""
Forms = dict[int, tuple[Form, Form]]
"""The forms of what a stage receives and returns, by the number of the stage."""


@dataclass(frozen=True)
class KnownForms:
    """The forms of all stages, provided in a World whose other ranks do not exist."""

    forms: Forms


class StageFlow:
    """The stages of a model of class `kind`: this rank's `parts`, and the ranks of all, `owners`.

    It sends the shapes of tensors with them, so it runs before they are known.
    """

    def __init__(
        self, kind: str, world: World, parts: Mapping[int, StageModule], owners: Sequence[int]
    ) -> None:
        self._kind = kind
        self._world = world
        self._parts = parts
        self._owners = owners
        self._place = world.layout.coordinate(world.rank, "pipeline")
        self._group = world.mesh["pipeline"].get_group()
        self._known = world.provided(KnownForms)

    def run(self, inputs: Inputs, draws: Draws | None) -> tuple[Any, Forms]:
        """Run all stages forward once. Return the output and the forms of this rank's stages.

        The output is None on ranks without the last stage. An error of one stage is raised on its rank
        and on those of all later stages. Collective over the pipeline.
        """
        forms: Forms = {}
        handed: tuple[Tensor, ...] = ()
        result = None
        failure: Exception | None = None
        for number, part in self._parts.items():
            before = self._owners[number - 1] if number else self._place
            part.inputs = [inputs]
            try:
                if before == self._place and failure is not None:
                    raise failure
                received = handed if before == self._place else self._receive(before, number)
                with Drawing(draws):
                    output = part(*received, micro=0)
            except Exception as error:  # later stages of this rank get it too, and pass it on
                failure = failure or error
                if number < len(self._owners) - 1 and self._owners[number + 1] != self._place:
                    self._send_failure(error, self._owners[number + 1])
                continue
            forms[number] = (_form(received), _form(output))
            if number == len(self._owners) - 1:
                result = part.whole(output)
            elif self._owners[number + 1] == self._place:
                handed = output
            else:
                self._send(output, self._owners[number + 1])
        if failure is not None:
            raise failure
        return result, forms

    def _send_failure(self, error: Exception, to: int) -> None:
        """Make later stages fail too, so that they do not wait."""
        if not isinstance(error, ShoalError):
            # `failure.is_by_peer` recognizes this fix.
            error = StepError(
                given=f"a stage of a {self._kind} on rank {self._world.rank}",
                found=f"{type(error).__name__}: {error}",
                fix="see that rank's own error; python train.py in one process may show more",
            )
        objects.send(error, self._group, to)

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        if self._known is None:
            objects.send(_form(tensors), self._group, to)
        self._exchange(dist.isend, tensors, to)

    def _receive(self, source: int, stage: int) -> tuple[Tensor, ...]:
        found: ShoalError | Form = (
            objects.receive(self._group, source) if self._known is None else self._known.forms[stage][0]
        )
        if isinstance(found, ShoalError):
            raise found
        tensors = tuple(
            torch.empty(size, dtype=dtype, device=self._world.device) for size, dtype in found
        )
        self._exchange(dist.irecv, tensors, source)
        return tensors

    def _exchange(self, operation: Any, tensors: Sequence[Tensor], peer: int) -> None:
        """Send tensors to a rank of the pipeline, or receive them from it.

        In one batch, as schedules do: for a single send, NCCL would make a communicator of two ranks.
        """
        pairs = [dist.P2POp(operation, each, group=self._group, group_peer=peer) for each in tensors]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()


def _form(tensors: Sequence[Tensor]) -> Form:
    return tuple((tensor.size(), tensor.dtype) for tensor in tensors)
