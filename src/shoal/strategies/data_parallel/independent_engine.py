"""The base of engines whose ranks step separately, each on its local batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shoal.data.batch import Batch
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import Totals
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import LocalEngine
from shoal.strategies.reducer import LocalReducer
from shoal.strategies.task import Task


class IndependentEngine(LocalEngine):
    """Engine that trains this rank's replica, which begins with rank 0's parameters and buffers.

    A custom training loop cannot use it, because it must know when the optimizer has stepped.
    """

    loopable = False
    independent_steps = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(LocalReducer(HeldParameters(module, world)))
        self.waits_because = Engine.waits_because
        for tensor in (*module.parameters(), *module.buffers()):
            if world.size > 1:
                dist.broadcast(tensor.detach(), group=world.group, group_src=0)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Compute the gradients of this rank's local batch; see the contract."""
        totals = super().gradients(task, batch, autocast=autocast, scale=scale)
        return totals.read()._replace(local=True)
