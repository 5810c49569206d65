"""The engine of `exact="bits"`, whose gradients other ranks compute too, for a comparison of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.coupled import CoupledStep
from shoal.data.micro import MicroBatch
from shoal.strategies.contracts import PartialSums
from shoal.strategies.data_parallel.fixed_order import FixedOrderReducer
from shoal.strategies.eval_mode import random_states_kept
from shoal.strategies.local import LocalEngine
from shoal.strategies.task import Task


class RepeatableEngine(LocalEngine):
    """Engine that computes the partial sums of any rank, with the same bits as that rank.

    `names` has the names of the parameters, in the order of the sums.
    """

    reducer: FixedOrderReducer

    def __init__(self, reducer: FixedOrderReducer) -> None:
        super().__init__(reducer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.held.parameters]

    @contextmanager
    def observed(self, observer: Callable[[PartialSums], None]) -> Iterator[None]:
        """Call `observer` with the partial sums of this rank in the batch inside the block."""
        self.reducer.observer = observer
        try:
            yield
        finally:
            self.reducer.observer = None

    def compute(
        self, rank: int, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> PartialSums:
        """Return the partial sums that `rank` computes in the batch.

        Gradients, random states and the statistics that layers record stay as they are.
        """
        coupled = self.world.service(CoupledStep)

        def passes() -> Iterator[tuple[Tensor, MicroBatch]]:
            for micro in batch.micros_of(rank):
                with coupled.processing(micro):
                    yield self.loss(task, micro, batch.seed, autocast)[0], micro

        with random_states_kept(self.module), coupled.recording_nothing():
            return self.reducer.partial_sums(passes(), batch.size, scale)
