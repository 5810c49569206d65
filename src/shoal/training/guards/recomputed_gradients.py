"""The guard of gradients: another rank computes them too, before they are summed over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from shoal.data.batch import Batch
from shoal.strategies.contracts import PartialSums, RepeatableGradients
from shoal.strategies.held_parameters import first
from shoal.telemetry.events import Events
from shoal.training.guards.checksums import sum_bits
from shoal.training.guards.records import record_checks, record_corruption
from shoal.training.guards.schedule import CheckSchedule
from shoal.training.guards.votes import Sums, Verdict, judge_gradients
from shoal.util.clock import CLOCK
from shoal.util.errors import CorruptionError

if TYPE_CHECKING:
    from shoal.training.step import Checking, Step


class GradientGuard:
    """Compares the gradients of each rank with those that the rank before it computes from its data.

    The Step runs checked steps in `checking`. If the results differ, all ranks compute the gradients
    again, and the majority decides which rank was wrong.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        gradients: RepeatableGradients,
        events: Events,
        *,
        budget: float,
    ) -> None:
        self._name = name
        self._step = step
        self._gradients = gradients
        self._world = step.engine.world
        self._events = events
        self._schedule = CheckSchedule(self._world, budget=budget, step=step.number)
        step.checking = _calling(weakref.ref(self))

    def checking(
        self, batch: Batch, autocast: torch.dtype | None, scale: float
    ) -> AbstractContextManager[None]:
        """Return the context in which the Step computes the gradients of a batch. Collective."""
        if not self._schedule.is_due(self._step.number + 1):
            return nullcontext()
        return self._check(batch, autocast, scale)

    def tick(self) -> None:
        """Plan the next check if one has run. Collective."""
        self._schedule.count_step()
        if self._schedule.due is None:
            began = CLOCK.now()
            ranks = self._world.gather(self._schedule.times())
            self._schedule.plan(self._step.number, ranks, more=CLOCK.now() - began)

    def close(self) -> None:
        """Leave the Step, and record the number of checks and their time."""
        self._step.checking = None
        record_checks(self._events, self._name, "gradients", self._schedule)

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
                self._raise_differing(judge_gradients(first_results, [again for *_, again in found]))

    def _sum_all(self, sums: PartialSums) -> dict[str, int]:
        """Return one checksum for each parameter, over all subtrees."""
        totals = dict.fromkeys(self._gradients.names, 0)
        for gradients in sums:
            for name, value in sum_bits(dict(zip(totals, gradients, strict=True))).items():
                totals[name] = (totals[name] + value) % 2**64
        return totals

    def _raise_differing(self, verdict: Verdict) -> None:
        step = self._step.number + 1
        tensors = [f"the gradient of {name}" for name in verdict.tensors]
        ranks = ", ".join(map(str, verdict.ranks))
        record_corruption(self._events, step, "gradients", verdict.ranks, tensors)
        raise CorruptionError(
            given=f"the gradients of step {step}, which two ranks compute from the same samples",
            found=f"rank {ranks} differs from the majority in {first(tensors)}"
            if verdict.outvoted
            else f"ranks {ranks} differ in {first(tensors)}, without a majority",
            fix="start the script again, which resumes from the latest complete checkpoint; if it "
            "happens again, look for code that depends on the rank, or test the host of this rank: "
            "shoal doctor",
        )


def _digest(sums: Sums) -> str:
    return sha256(repr(sums).encode()).hexdigest()[:16]


def _calling(reference: weakref.ref[GradientGuard]) -> Checking:
    """Return the `checking` of a guard without keeping it alive."""

    def checking(
        batch: Batch, autocast: torch.dtype | None, scale: float
    ) -> AbstractContextManager[None]:
        guard = reference()
        return nullcontext() if guard is None else guard.checking(batch, autocast, scale)

    return checking
