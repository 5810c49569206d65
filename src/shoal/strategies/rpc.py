"""torch RPC between the ranks of a world, started once and closed without waiting for dead ranks.

Calls are pickled functions, so a process that reaches the port of a rank can run any code in it.
Therefore RPC listens on the same interface as the world: on the loopback interface if all ranks are on
one machine, else on the one interface on which the ranks were found to reach each other.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from shoal._torch.c10d import has_rpc_agent
from shoal.distributed import env_vars, interfaces
from shoal.distributed.watchdog.world_watchdog import MARGIN_SECONDS
from shoal.distributed.world import World
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, StepError

ANSWER_SECONDS = 2.0
"""Time limit for the answer of a rank to a liveness check. A stopped process takes longer."""
FAREWELL_SECONDS = 5.0
"""How long a closing rank waits for others that may still call it. Dead ranks never close."""
THREADS = 16
"""Number of threads for calls on each rank, plus two for each rank that may wait in one."""
_POLL_SECONDS = 0.05
_LATE = "RPC ran for more than set timeout"
_SCHEME, _PREFIX = "shoal-world", "shoal/rpc"

_TARGETS: WeakValueDictionary[str, object] = WeakValueDictionary()
"""Objects that this process serves, by key. A call of torch RPC runs a function of a module with its
arguments only, and a process has a single agent, so this table is global."""


class RPCAgent:
    """The RPC endpoint of this rank in a world. Creating it is collective."""

    def __init__(self, world: World) -> None:
        if not rpc.is_available():
            raise LaunchError(
                given="a strategy over torch RPC",
                found="this build of torch has no RPC (USE_TENSORPIPE)",
                fix="install torch from pytorch.org, or use a strategy without RPC",
            )
        if has_rpc_agent():
            raise StepError(
                given="a strategy that uses torch RPC, in a process that has called rpc.init_rpc",
                found="torch supports a single RPC agent per process",
                fix="leave rpc.init_rpc out, or call rpc.shutdown() before shoal.parallelize",
            )
        self.hosts: list[str] = world.gather(socket.gethostname())
        self._rank, self._size = world.rank, world.size
        self._answered = world.watchdog.answered
        self._store = _TARGETS[_PREFIX] = world.store(_PREFIX)
        self._closed = False
        self._kept: list[object] = []
        limits = world.watchdog.limits
        longest = max(limits.step, limits.prepare) + MARGIN_SECONDS
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS + 2 * world.size,
            rpc_timeout=longest,
            init_method=f"{_SCHEME}://",
            # No shared memory: its thread polls for messages without a pause, and used an eighth to a
            # quarter of the core on which a rank computed.
            _transports=["uv"],
            _channels=["basic"],
        )
        waits = self._store.timeout
        with contextlib.suppress(RuntimeError):  # an earlier world registered it, and torch keeps it
            register_rendezvous_handler(_SCHEME, _rendezvous)
        try:
            with env_vars.set_defaults(_interface(world)), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # of torch
                rpc.init_rpc(
                    name_of(world.rank),
                    rank=world.rank,
                    world_size=world.size,
                    rpc_backend_options=options,
                )
        finally:
            self._store.set_timeout(waits)  # torch sets the timeout of calls on the world's store

    def serve(self, key: str, target: object) -> None:
        """Let other ranks call methods of `target` by `key`, while it is alive."""
        _TARGETS[key] = target

    def keep(self, *objects: object) -> None:
        """Keep objects alive until the world is closed."""
        self._kept += objects

    def ask(self, rank: int, key: str, method: str, *arguments: Any) -> Any:
        """Call a method on another rank and return its result.

        `key` is that of the object on the other rank. Raises StepError if that rank is gone.
        """
        with self.explained([rank]):
            return self.send(rank, key, method, *arguments).wait()

    def tell(self, ranks: Sequence[int], key: str, method: str, *arguments: Any) -> None:
        """Call a method on all `ranks` at once and wait until all have returned; see `ask`."""
        with self.explained(ranks):
            for answer in [self.send(rank, key, method, *arguments) for rank in ranks]:
                answer.wait()

    def send(self, rank: int, key: str, method: str, *arguments: Any) -> torch.futures.Future[Any]:
        """Begin to call a method on another rank; see `ask`."""
        answer: torch.futures.Future[Any] = rpc.rpc_async(
            name_of(rank), _call, args=(key, method, *arguments)
        )
        answer.add_done_callback(lambda _: self._answered())
        return answer

    @contextlib.contextmanager
    def explained(self, ranks: Sequence[int]) -> Iterator[None]:
        """Raise StepError in place of torch's errors if one of `ranks` is gone."""
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
                given=f"rank {self._rank} of {self._size}, which calls others through torch RPC",
                found=f"{who} {verb} gone: its process has ended, or it has left the world",
                fix="see the first error of all ranks; with shoal run --restarts N, or when you run "
                "the same command again, Run.restore resumes from the latest complete checkpoint",
            ) from error

    def close(self) -> None:
        """Shut down, together with the other ranks if all of them close in time, else alone.

        Does not wait for other ranks while an error propagates.
        """
        if self._closed:
            return
        self._closed = True
        together = sys.exc_info()[0] is None and self._others_leave()
        with contextlib.suppress(RuntimeError):  # a rank has just died
            rpc.shutdown(graceful=together, timeout=FAREWELL_SECONDS)
        self._kept.clear()

    def _others_leave(self) -> bool:
        """Return whether all ranks close in time."""
        until = CLOCK.now() + FAREWELL_SECONDS
        with contextlib.suppress(dist.DistError):  # rank 0 hosted the store, and has left
            self._store.add("left", 1)
            while CLOCK.now() < until:
                if self._store.add("left", 0) == self._size:
                    return True
                CLOCK.sleep(_POLL_SECONDS)
        return False


def name_of(rank: int) -> str:
    """Return the name of a rank in RPC."""
    return f"rank{rank}"


def _answers(rank: int) -> bool:
    """Return whether a rank answers, or may still do so."""
    try:
        rpc.rpc_sync(name_of(rank), _here, timeout=ANSWER_SECONDS)
    except RuntimeError as error:
        return _LATE in str(error)
    return True


def _call(key: str, method: str, *arguments: Any) -> Any:
    """Call a method of the object that this rank serves by `key`, for another rank."""
    target = _TARGETS.get(key)
    if target is None:
        raise RuntimeError("this rank has deleted the object that the call needs")
    return getattr(target, method)(*arguments)


def _here() -> None:
    """Do nothing: the answer to a liveness check."""


def _interface(world: World) -> dict[str, str]:
    """Return the variable with the interface for RPC. torch's default is the hostname's address."""
    chosen = [str(each.value) for each in world.decisions if each.what == "interface"]
    if world.placement.nodes == 1:
        chosen = [each.name for each in interfaces.interfaces() if each.loopback]
    return {env_vars.TENSORPIPE: chosen[0]} if chosen else {}


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and world size: RPC finds the other ranks through the world's store."""
    yield _TARGETS[_PREFIX], dist.get_rank(), dist.get_world_size()
