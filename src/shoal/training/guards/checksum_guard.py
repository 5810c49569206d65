"""The common part of the guards that compare checksums: sums of bits, schedule, events, errors."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.strategies.held_parameters import first
from shoal.telemetry.events import Events, Plain
from shoal.training.guards.schedule import CheckSchedule, GuardTimes
from shoal.training.guards.votes import Verdict
from shoal.util.clock import CLOCK
from shoal.util.errors import CorruptionError

if TYPE_CHECKING:
    from shoal.training.train_state import TrainState

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ChecksumGuard(ABC):
    """Guard of one TrainState that compares checksums on the steps of a schedule.

    `checked` is the name of what it compares, in events.
    """

    checked: str

    def __init__(self, name: str, state: TrainState, events: Events, *, budget: float) -> None:
        self._name = name
        self._state = state
        self._world = state.engine.world
        self._events = events
        self._schedule = CheckSchedule(self._world, budget=budget, step=state.number)

    def tick(self) -> None:
        """Plan the next check if one has run. Collective.

        Raises CorruptionError, on all ranks, if ranks have other values than the majority.
        """
        self._schedule.count_step()
        if self._schedule.due is None:
            began = CLOCK.now()
            ranks = self._compare()
            self._schedule.plan(self._state.number, ranks, more=CLOCK.now() - began)

    def close(self) -> None:
        """End the checks, and record their number and time, if there were any."""
        summary = self._schedule.summary()
        if summary:
            self._events.write("guards", {"name": self._name, "checked": self.checked, **summary})

    @abstractmethod
    def _compare(self) -> Sequence[GuardTimes]:
        """Compare ranks after a check; return the times of each of them. Collective."""

    def _record(self, step: int, guard: str, ranks: Sequence[int], tensors: Sequence[str]) -> None:
        """Record what a guard has found."""
        found: dict[str, Plain] = {
            "step": step,
            "guard": guard,
            "ranks": [*ranks],
            "tensors": [*tensors[:10]],
        }
        self._events.write("corruption", found)

    def _raise_differing(
        self, step: int, guard: str, verdicts: Sequence[Verdict], given: str, prefix: str = ""
    ) -> None:
        """Record that ranks differ, and raise CorruptionError for the first verdict."""
        one = verdicts[0]
        ranks = ", ".join(map(str, one.ranks))
        tensors = [f"{prefix}{name}" for name in chain.from_iterable(v.tensors for v in verdicts)]
        self._record(step, guard, one.ranks, tensors)
        raise CorruptionError(
            given=given,
            found=f"rank {ranks} differs from the majority in {first(tensors)}"
            if one.outvoted
            else f"ranks {ranks} differ in {first(tensors)}, without a majority",
            fix="start the script again, which resumes from the latest complete checkpoint; if it "
            "happens again, look for code that depends on the rank, or test the host of this rank: "
            "shoal doctor",
        )


def weakly(
    method: Callable[..., Any], otherwise: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """Return a function that calls a method of an object that it does not keep alive.

    It returns the result of `otherwise` once the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return otherwise() if found is None else found(*arguments)

    return call


@torch.no_grad()
def sum_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor: the sum of its words of up to 64 bits, modulo 2^64.

    A flipped bit changes one word by a power of two, so the sum changes too. The host waits once per
    device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, {})[name] = _sum_words(tensor)
    found: dict[str, int] = {}
    for sums in by_device.values():
        found.update(zip(sums, torch.stack(tuple(sums.values())).tolist(), strict=True))
    return {name: found[name] for name in tensors}


def _sum_words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    offset, size = flat.storage_offset() * flat.element_size(), flat.nbytes
    kind = next(each for each in _WORDS if not (offset % each.itemsize or size % each.itemsize))
    return flat.view(kind).sum(dtype=torch.int64)
