"""The guard of one model and its optimizer: takes checksums after an update and compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal._torch.autograd import version
from shoal.strategies.dtensor import is_divided, share
from shoal.strategies.held_parameters import first
from shoal.telemetry.events import Events
from shoal.training.guards.checksum_guard import ChecksumGuard, sum_bits, weakly
from shoal.training.guards.options import Guards
from shoal.training.guards.schedule import GuardTimes
from shoal.training.guards.votes import differing_tensors
from shoal.training.optimizer_state import parameter_names
from shoal.util.errors import CorruptionError, StepError

if TYPE_CHECKING:
    from shoal.training.train_state import TrainState


class _HeldTensor(NamedTuple):
    """A tensor of this rank, with the number of changes that torch has made to it."""

    tensor: Tensor
    version: tuple[int, int]


class StateGuard(ChecksumGuard):
    """Compares the parameters, the optimizer state and the constant buffers of one TrainState.

    Hooks of the optimizer call it before and after each update. `tick` follows the update on all
    ranks; it compares replicas and decides when the next check is due.
    """

    checked = "state"

    def __init__(
        self, name: str, state: TrainState, options: Guards, events: Events, *, budget: float
    ) -> None:
        if state.engine.independent_steps:
            raise StepError(
                given=f"shoal.Run(…, guards=shoal.Guards()) with {state.engine.strategy}",
                found="its ranks change their parameters separately, so that checksums differ",
                fix="leave guards out",
            )
        super().__init__(name, state, events, budget=budget)
        self._options = options
        self._groups = [g for g in self._world.layout.groups("replicate") if len(g) > 1]
        self._constant = {f"buffer {n}": _held(b) for n, b in _plain(state.model.named_buffers())}
        self._frozen = {n: p for n, p in _plain(state.model.named_parameters()) if not p.requires_grad}
        self._kept: dict[str, _HeldTensor] = {}
        self._sums: dict[str, int] = {}
        self._handles = [
            state.optimizer.register_step_pre_hook(weakly(self._check_memory)),
            state.optimizer.register_step_post_hook(weakly(self._take_sums)),
        ]

    def close(self) -> None:
        """Remove the hooks, and record the number of checks and their time."""
        for handle in self._handles:
            handle.remove()
        super().close()

    def _compare(self) -> Sequence[GuardTimes]:
        """Compare replicas; see ChecksumGuard."""
        digest = sha256(repr(self._sums).encode()).hexdigest()[:16]
        times = self._schedule.times()
        if self._options.continuity:  # takes the checksums once more
            times = replace(times, check=2 * times.check)
        digests, ranks = zip(*self._world.gather((digest, times)), strict=True)
        if self._options.replicas and any(
            len({digests[rank] for rank in group}) > 1 for group in self._groups
        ):
            differing = differing_tensors(self._groups, self._world.gather(self._sums))
            number = self._state.number
            given = f"the replicas of the model after step {number}"
            self._raise_differing(number, "replicas", differing, given)
        return ranks

    def _take_sums(self, *_: object) -> None:
        """Take the checksums after an update, if a check is due."""
        if not self._schedule.is_due(self._state.number + 1):
            return
        self._schedule.begin()
        with self._schedule.spending():
            self._kept = self._tensors()
            self._sums = _sum_all(self._kept)

    def _check_memory(self, *_: object) -> None:
        """Compare the checksums of the last update, before the next one. Raises CorruptionError."""
        kept, self._kept = self._kept, {}
        if not kept or not self._options.continuity:
            return
        with self._schedule.spending():
            now = self._tensors()
            same = {n: held for n, held in now.items() if n in kept and _same(held, kept[n])}
            found = _sum_all(same)
            changed = [name for name, value in found.items() if value != self._sums[name]]
        if changed:
            self._record(self._state.number, "continuity", [self._world.rank], changed)
            raise CorruptionError(
                given=f"the memory of rank {self._world.rank}: {first(changed)}",
                found=f"it changed between the update of step {self._state.number} and the next one, "
                "and no operation of PyTorch changed it",
                fix="start the script again, which resumes from the latest complete checkpoint, and "
                "test the memory of this host; if your code writes through tensor.data or NumPy, use "
                "with torch.no_grad(): tensor.copy_(…)",
            )

    def _tensors(self) -> dict[str, _HeldTensor]:
        """Return what must not change until the next update, by name."""
        state = self._state
        parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
        found: dict[str, Tensor] = dict(self._frozen)
        for name, parameter in zip(
            parameter_names(state.model, state.optimizer), parameters, strict=True
        ):
            found[name] = parameter
            for key, value in state.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer state {key} of {name}"] = value
        held = {name: _held(tensor) for name, tensor in found.items()}
        self._constant = {
            n: kept for n, kept in self._constant.items() if _same(_held(kept.tensor), kept)
        }
        return held | self._constant


def _held(tensor: Tensor) -> _HeldTensor:
    with torch.no_grad():
        # An operation on a DTensor counts for the DTensor, and one on its shard for the shard.
        return _HeldTensor(tensor, (version(tensor), version(share(tensor))))


def _same(one: _HeldTensor, other: _HeldTensor) -> bool:
    """Return whether it is the same tensor, and PyTorch has not changed it in between."""
    return one.tensor is other.tensor and one.version == other.version


def _sum_all(held: Mapping[str, _HeldTensor]) -> dict[str, int]:
    with torch.no_grad():
        return sum_bits({name: share(each.tensor) for name, each in held.items()})


def _plain(named: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that are dense and not sharded, without copies that share memory."""
    return [
        (n, t) for n, t in named if not is_divided(t) and t.layout is torch.strided and not t.is_meta
    ]
