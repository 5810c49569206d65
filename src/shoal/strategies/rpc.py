"""torch RPC between the ranks of a world: begun once, and left without waiting for those that died.

Calls are pickled, and run what they name: a process that reaches the port of a rank can run anything
in it. So it listens where the world does: on the loopback interface where all ranks are on one machine,
else on the one interface by which they were found to reach each other.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from shoal._torch.c10d import default_store, has_rpc_agent
from shoal.distributed import env_vars, interfaces
from shoal.distributed.watchdog.world_watchdog import MARGIN_SECONDS
from shoal.distributed.world import World
from shoal.util.errors import LaunchError, StepError

ANSWER_SECONDS = 2.0
"""How long a rank that is asked whether it lives may take; one that is merely stopped takes longer."""
FAREWELL_SECONDS = 5.0
"""How long a rank that leaves waits for others that may still call it; the dead don't leave."""
THREADS = 16
"""Of each rank's threads for calls, besides two for each rank that may wait in one."""
_POLL_SECONDS = 0.05
_LATE = "RPC ran for more than set timeout"
_SCHEME, _PREFIX = "shoal-world", "shoal/rpc"

_TARGETS: WeakValueDictionary[str, object] = WeakValueDictionary()
"""What this process serves, by key. torch runs a function of a module for each call, with nothing but
its arguments, and has one agent in a process: so the one table of the process is here."""


class RPCAgent:
    """This rank's end of torch RPC in a world; making it is collective."""

    def __init__(self, world: World) -> None:
        if not rpc.is_available():
            raise LaunchError(
                given="a strategy over torch RPC",
                found="this torch is built without it (USE_TENSORPIPE)",
                fix="the wheels of pytorch.org have it; or a strategy that does without",
            )
        if has_rpc_agent():
            raise StepError(
                given="a strategy that uses torch RPC, in a process that has called rpc.init_rpc",
                found="torch has one RPC agent in a process",
                fix="leave rpc.init_rpc out, or call rpc.shutdown() before shoal.parallelize",
            )
        self.hosts: list[str] = world.gather(socket.gethostname())
        self._rank, self._size = world.rank, world.size
        self._answered = world.watchdog.answered
        self._store = world.store(_PREFIX)
        self._closed = False
        self._kept: list[object] = []
        limits = world.watchdog.limits
        longest = max(limits.step, limits.prepare) + MARGIN_SECONDS
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS + 2 * world.size,
            rpc_timeout=longest,
            init_method=f"{_SCHEME}://",
            # Not by shared memory: a thread of that looks for messages without a pause, and took an
            # eighth to a quarter of the core that a rank computed on.
            _transports=["uv"],
            _channels=["basic"],
        )
        waits = self._store.timeout
        with contextlib.suppress(
            RuntimeError
        ):  # of an earlier world: torch keeps it as long as it runs
            register_rendezvous_handler(_SCHEME, _meet)
        try:
            with env_vars.set_defaults(_interface(world)), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch is
                rpc.init_rpc(
                    name_of(world.rank),
                    rank=world.rank,
                    world_size=world.size,
                    rpc_backend_options=options,
                )
        finally:
            self._store.set_timeout(waits)  # torch gives the world's store that of calls

    def serve(self, key: str, target: object) -> None:
        """Let other ranks call methods of `target` by `key`, for as long as it lives."""
        _TARGETS[key] = target

    def keep(self, *objects: object) -> None:
        """Keep objects alive until the world is closed."""
        self._kept += objects

    def ask(self, rank: int, key: str, method: str, *arguments: Any) -> Any:
        """Return what a method returns on another rank, gradients and all; StepError if that is gone.

        `key` is that of the object which the other rank serves.
        """
        with self.explained([rank]):
            answer = rpc.rpc_sync(name_of(rank), _call, args=(key, method, *arguments))
        self._answered()
        return answer

    def tell(self, ranks: Sequence[int], key: str, method: str, *arguments: Any) -> None:
        """Call a method on all `ranks` at once and wait until all have returned; see `ask`."""
        with self.telling(ranks, key, method, *arguments):
            pass

    @contextlib.contextmanager
    def telling(self, ranks: Sequence[int], key: str, method: str, *arguments: Any) -> Iterator[None]:
        """Call as `tell` does; the body of the `with` runs in the meantime."""
        with self.explained(ranks):
            arguments = (key, method, *arguments)
            begun = [rpc.rpc_async(name_of(rank), _call, args=arguments) for rank in ranks]
            yield
            for each in begun:
                each.wait()
                self._answered()

    @contextlib.contextmanager
    def explained(self, ranks: Sequence[int]) -> Iterator[None]:
        """Raises StepError in place of torch's errors if one of `ranks` is gone."""
        try:
            yield
        except RuntimeError as error:
            self.look(ranks, error)
            raise

    def look(self, ranks: Sequence[int], error: Exception | None = None) -> None:
        """Raise StepError if one of `ranks` is gone."""
        gone = [rank for rank in ranks if rank != self._rank and not _answers(rank)]
        if gone:
            who = " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in gone)
            verb = "is" if len(gone) == 1 else "are"
            raise StepError(
                given=f"rank {self._rank} of {self._size}, which calls others by torch RPC",
                found=f"{who} {verb} gone: its process has ended, or it has left the world",
                fix="see the first error of all ranks; with shoal run --restarts N, or when the same "
                "command is run again, Run.restore goes on from the newest checkpoint",
            ) from error

    def close(self) -> None:
        """Leave, together with the others if they all come to do so, else alone.

        Nobody is waited for where an error is on its way.
        """
        if self._closed:
            return
        self._closed = True
        together = sys.exc_info()[0] is None and self._others_leave()
        with contextlib.suppress(RuntimeError):  # one of them has died just now
            rpc.shutdown(graceful=together, timeout=FAREWELL_SECONDS)
        self._kept.clear()

    def _others_leave(self) -> bool:
        """Whether all ranks have come to leave."""
        until = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(dist.DistError):  # rank 0 hosted the store, and has left
            self._store.add("left", 1)
            while time.monotonic() < until:
                if self._store.add("left", 0) == self._size:
                    return True
                time.sleep(_POLL_SECONDS)
        return False


def name_of(rank: int) -> str:
    """Return the name of a rank in RPC."""
    return f"rank{rank}"


def _answers(rank: int) -> bool:
    """Whether a rank answers, or may still do so."""
    try:
        rpc.rpc_sync(name_of(rank), _here, timeout=ANSWER_SECONDS)
    except RuntimeError as error:
        return _LATE in str(error)
    return True


def _call(key: str, method: str, *arguments: Any) -> Any:
    """Call a method of the object that this rank serves by `key`; other ranks have it run here."""
    target = _TARGETS.get(key)
    if target is None:
        raise RuntimeError("this rank has dropped the object that the call is for")
    return getattr(target, method)(*arguments)


def _here() -> None:
    """What a rank does that is asked whether it lives."""


def _interface(world: World) -> dict[str, str]:
    """What tells torch where to listen: else it takes the address that the host's own name has."""
    chosen = [str(each.value) for each in world.decisions if each.what == "interface"]
    if world.placement.nodes == 1:
        chosen = [each.name for each in interfaces.interfaces() if each.loopback]
    return {env_vars.TENSORPIPE: chosen[0]} if chosen else {}


def _meet(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """How RPC finds the other ranks: by the store of the world."""
    store = default_store()
    yield PrefixStore(_PREFIX, store), dist.get_rank(), dist.get_world_size()
