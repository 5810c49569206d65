"""The guard of gradients: another rank computes them too, before they are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from shoal.data.batch import Batch
from shoal.strategies.contracts import PartialSums, RepeatableGradients
from shoal.telemetry.events import Events
from shoal.training.guards.checksum_guard import ChecksumGuard, sum_bits, weakly
from shoal.training.guards.schedule import GuardTimes
from shoal.training.guards.votes import Sums, judge_gradients

if TYPE_CHECKING:
    from shoal.training.step import Step


class GradientGuard(ChecksumGuard):
    """Compares the gradients of each rank with those that the rank before it computes from its data.

    The Step runs checked steps in `checking`. If the results differ, all ranks compute the gradients
    again, and the majority decides which rank was wrong.
    """

    checked = "gradients"

    def __init__(
        self,
        name: str,
        step: Step,
        gradients: RepeatableGradients,
        events: Events,
        *,
        budget: float,
    ) -> None:
        super().__init__(name, step, events, budget=budget)
        self._step = step
        self._gradients = gradients
        step.checking = weakly(self.checking, nullcontext)

    def checking(
        self, batch: Batch, autocast: torch.dtype | None, scale: float
    ) -> AbstractContextManager[None]:
        """Return the context in which the Step computes the gradients of a batch. Collective."""
        if not self._schedule.is_due(self._step.number + 1):
            return nullcontext()
        return self._check(batch, autocast, scale)

    def close(self) -> None:
        """Leave the Step, and record the number of checks and their time."""
        self._step.checking = None
        super().close()

    def _compare(self) -> list[GuardTimes]:
        return self._world.gather(self._schedule.times())

    @contextmanager
    def _check(self, batch: Batch, autocast: torch.dtype | None, scale: float) -> Iterator[None]:
        self._schedule.begin()
        rank, size = self._world.rank, self._world.size

        def compute(of: int) -> dict[str, int]:
            sums = self._gradients.compute(of, self._step.task, batch, autocast=autocast, scale=scale)
            return self._sum_all(sums)

        with self._schedule.spending():
            theirs = compute((rank + 1) % size)
        own: dict[str, int] = {}

        def observe(sums: PartialSums) -> None:
            with self._schedule.spending():
                own.update(self._sum_all(sums))

        with self._gradients.observed(observe):
            yield
        with self._schedule.spending():
            digests = self._world.gather((_digest(own), _digest(theirs)))
        for of in range(size):
            before = (of - 1) % size
            if digests[of][0] != digests[before][1]:
                # All ranks come here, since all have the same digests.
                found = self._world.gather((own, theirs, compute(of)))
                first_results = {of: found[of][0], before: found[before][1]}
                step = self._step.number + 1
                self._raise_differing(
                    step,
                    "gradients",
                    [judge_gradients(first_results, [again for *_, again in found])],
                    f"the gradients of step {step}, which two ranks compute from the same samples",
                    prefix="the gradient of ",
                )

    def _sum_all(self, sums: PartialSums) -> dict[str, int]:
        """Return one checksum for each parameter, over all subtrees."""
        totals = dict.fromkeys(self._gradients.names, 0)
        for gradients in sums:
            for name, value in sum_bits(dict(zip(totals, gradients, strict=True))).items():
                totals[name] = (totals[name] + value) % 2**64
        return totals


def _digest(sums: Sums) -> str:
    return sha256(repr(sums).encode()).hexdigest()[:16]
