"""Check before each collective that all ranks call the same one, with tensors of one size and dtype.

With Gloo, a different size aborts the process, and a different dtype gives wrong numbers silently. All
collectives, including functional ones and those of torch's C++ code, go through torch's dispatcher. The
check intercepts them there, while the ranks of the group compare their calls. That takes one more small
collective for each, so the check does not stay on.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal._torch.dispatch import intercept, without_modes
from shoal.distributed.watchdog import stacks
from shoal.telemetry.flight_recorder import Collective, describe_tensors
from shoal.util.differences import and_more, minority
from shoal.util.errors import AgreementError


class _ComparedCollective(NamedTuple):
    """A collective: its name, the argument whose tensors are compared, and whether sizes are compared
    too.
    """

    operation: str
    argument: int | None
    sized: bool = True


_CALLS = {
    "allreduce_": _ComparedCollective("all_reduce", 0),
    "allreduce_coalesced_": _ComparedCollective("all_reduce", 0),
    "broadcast_": _ComparedCollective("broadcast", 0),
    "reduce_": _ComparedCollective("reduce", 0),
    "allgather_": _ComparedCollective("all_gather", 1),
    "_allgather_base_": _ComparedCollective("all_gather", 1),
    "allgather_coalesced_": _ComparedCollective("all_gather", 1),
    "allgather_into_tensor_coalesced_": _ComparedCollective("all_gather", 1),
    "reduce_scatter_": _ComparedCollective("reduce_scatter", 0),
    "_reduce_scatter_base_": _ComparedCollective("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": _ComparedCollective("reduce_scatter", 0),
    "gather_": _ComparedCollective("gather", 1),
    "scatter_": _ComparedCollective("scatter", 0),
    "alltoall_": _ComparedCollective("all_to_all", 1, sized=False),
    "alltoall_base_": _ComparedCollective("all_to_all", 1, sized=False),
    "barrier": _ComparedCollective("barrier", None),
}
BACKGROUND_SAVE = "shoal background save"
"""Name of background threads that call collectives. Removing the interception frees it even if such a
thread is just about to use it, so removal waits until there are none.
"""
_KEY = "BackendSelect"
"""Where calls are intercepted: below autograd and all modes, above the kernels of the devices. When
redispatched, these run without Python's lock, which Gloo's threads need.
"""
_BYTES = 768
_LONGEST = 300


class CollectiveMatcher:
    """Compares each collective of CPU tensors with those of the other ranks, until `stop`.

    It skips threads other than the one that created it: their calls have no fixed order relative to the
    calls of that one, nor to the end of the check. A mismatch is an AgreementError on all ranks of the
    group, before any data is sent. `current` is the collective that is being checked, `found` is set
    after a mismatch.
    """

    def __init__(self, rank: int) -> None:
        self.current: Collective | None = None
        self.found = False
        self._comparing = True
        self._main = threading.get_ident()
        self._rank = rank
        checks = {name: functools.partial(self._before, call) for name, call in _CALLS.items()}
        self._stop_intercepting = intercept("c10d", checks, _KEY)

    def stop(self) -> None:
        """Stop comparing, from this call on; a later call removes the interception.

        The removal happens only while no background thread may be about to call a collective, on each
        rank independently.
        """
        self._comparing = False
        end = self._stop_intercepting
        if end is not None and not any(t.name == BACKGROUND_SAVE for t in threading.enumerate()):
            end()
            self._stop_intercepting = None

    def check(
        self, group: dist.ProcessGroup, operation: str, tensors: Sequence[Tensor], sized: bool
    ) -> None:
        """Compare a collective of a group that torch's dispatcher does not see."""
        if self._compares():
            self._compare(group, operation, tensors, sized)

    def _compares(self) -> bool:
        # current_thread() would make autograd's threads known to Python.
        return self._comparing and self.current is None and threading.get_ident() == self._main

    def _before(self, call: _ComparedCollective, *arguments: Any) -> None:
        if self._compares() and all(tensor.device.type == "cpu" for tensor in _flat(arguments)):
            script = next(each for each in arguments if isinstance(each, torch.ScriptObject))
            tensors = [] if call.argument is None else _flat(arguments[call.argument])
            group = dist.ProcessGroup.unbox(script)
            self._compare(group, call.operation, tensors, call.sized)

    def _compare(
        self, group: dist.ProcessGroup, operation: str, tensors: Sequence[Tensor], sized: bool
    ) -> None:
        if group.size() == 1:
            return
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shown = describe_tensors([tensor.shape for tensor in tensors], dtypes)
        sizes = [tensor.numel() for tensor in tensors] if sized else []
        place = str(stacks.own_line(stacks.stack(sys._getframe())))
        mine = (
            f"{operation} {dtypes} {sizes}"[:_LONGEST],
            f"{operation} of {shown}" if shown else operation,
            f"rank {self._rank} on {socket.gethostname()}",
            place[-_LONGEST:],
        )
        self.current = Collective(
            group=group.group_name, number=-1, operation=operation, tensors=shown, done=False
        )
        try:
            everyone = _exchange("\n".join(mine), group)
        finally:
            self.current = None
        calls = [text.split("\n") for text in everyone]
        usual, odd = minority([call[0] for call in calls])
        if odd:
            self.found = True
            raise _error(calls, usual, odd)


def _flat(value: Any) -> list[Tensor]:
    """Return the tensors in an argument, or in all of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _flat(each)]
    return []


def _exchange(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return the strings of all ranks of a group."""
    data = text.encode()[:_BYTES].ljust(_BYTES)
    # Modes that count or record tensor operations must not see these.
    with without_modes(), torch.no_grad():
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([everyone], [mine]).wait()
        return [bytes(one.tolist()).decode(errors="replace").rstrip() for one in everyone]


def _error(everyone: Sequence[Sequence[str]], usual: int, odd: Sequence[int]) -> AgreementError:
    _, called, other, there = everyone[usual]
    _, did, who, place = everyone[odd[0]]
    return AgreementError(
        given=f"{called} at {there} ({other}), on {len(everyone) - len(odd)} of {len(everyone)} ranks",
        found=f"{who} calls {did} at {place}{and_more(odd)}",
        fix="let all ranks call the same collectives in the same order, with tensors of one size and "
        "dtype: .to(torch.float32), and no collective under a condition that is false on some ranks",
    )
