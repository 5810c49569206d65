"""Real ranks for tests: N processes in one gloo group, started once and used for many calls."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

import shoal

# What a child would otherwise import again each time. The fork server imports it once.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",  # DistributedDataParallel imports it when first used, in more than a second
    "torch.distributed.tensor",
    "shoal.checkpoint",
    "shoal.data",
    "shoal.training.step",
]
CALL_SECONDS = 400.0
LIMITS = {"timeout": 120.0, "prepare_timeout": 120.0}
Kind = TypeVar("Kind", bound=shoal.ShoalError)

_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else is given while these tests run; what sets SO_REUSEADDR can listen there.

    So do torch's stores and all of Shoal. A port that is let go may be somebody's a moment later.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


class Ranks:
    """`ranks.call(function, *arguments)` runs `function(world, *arguments)` on every rank.

    Further options are those of `shoal.init`.
    """

    def __init__(
        self,
        size: int,
        *,
        layout: str = "replicate=-1",
        call_seconds: float = CALL_SECONDS,
        **options: Any,
    ) -> None:
        self.size = size
        self._call_seconds = call_seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        division = _Division(layout, free_port())
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, size, division, LIMITS | options),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def divide(self, layout: str) -> None:
        """From now on the same processes are a world of another layout, which they join anew."""
        division = _Division(layout, free_port())
        for pipe in self._pipes:
            pipe.send(division)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results in rank order; an exception of any rank is raised here with its traceback."""
        return _unless_raised(self.attempt(function, *arguments))

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results, or the exceptions in their place."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._call_seconds):
                self.kill()
                raise AssertionError(f"rank {rank} of {self.size} gave no answer")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(RankError(None, f"rank {rank} died"))
        return results

    def errors(self, kind: type[Kind], function: Callable[..., Any], *arguments: Any) -> list[Kind]:
        """The error of this kind that each rank raises."""
        found = []
        for outcome in self.attempt(function, *arguments):
            assert isinstance(outcome, RankError), outcome
            assert isinstance(outcome.error, kind), outcome.text
            found.append(outcome.error)
        return found

    def call_until_killed(self, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """The results; or None as soon as SIGKILL has ended one rank, and the others with it.

        A rank that raises may do so only because another one was killed.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        silent = dict(enumerate(self._pipes))
        results: list[Any] = [None] * self.size
        deadline = time.monotonic() + self._call_seconds
        while silent:
            sentinels = [process.sentinel for process in self.processes]
            ready = wait([*silent.values(), *sentinels], deadline - time.monotonic())
            if not ready or not set(sentinels).isdisjoint(ready):
                self.kill()
                assert ready, f"no rank was killed, and ranks {list(silent)} gave no answer"
                return None
            for rank in [rank for rank, pipe in silent.items() if pipe in ready]:
                pipe = silent.pop(rank)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    self.kill()
                    return None
        return _unless_raised(results)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()  # it may not have made its group yet
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started, and left
        for process in self.processes:
            process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class RankError(Exception):
    """What a rank raised: the ShoalError itself where it was one, and the traceback as text."""

    def __init__(self, error: shoal.ShoalError | None, text: str) -> None:
        super().__init__(error, text)
        self.error = error
        self.text = text


def _unless_raised(results: list[Any]) -> list[Any]:
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            raise AssertionError(f"rank {rank} of {len(results)}: {result.args[-1]}") from result
    return results


class _Division(NamedTuple):
    """How the ranks are divided, and where they meet: never again where a world before has met."""

    layout: str
    port: int


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    division: _Division | None,
    options: Mapping[str, Any],
) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # what the fork server has imported
    multiprocessing.set_start_method(None, force=True)  # of its own workers: that of any process
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
    )
    torch.set_num_threads(1)
    while division is not None:
        os.environ["MASTER_PORT"] = str(division.port)
        torch.manual_seed(2**62)  # no seed of a test before, which init would keep
        with shoal.init(layout=division.layout, **options) as world:
            division = _answer(pipe, world)


def _answer(pipe: Connection, world: shoal.World) -> _Division | None:
    """Do what is asked for, until another division is, or the asking ends."""
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return None
        if isinstance(asked, _Division):
            return asked
        function, arguments = asked
        try:
            result = function(world, *arguments)
        except BaseException as error:
            known = error if isinstance(error, shoal.ShoalError) else None
            result = RankError(known, traceback.format_exc())
        pipe.send(result)


@contextmanager
def several_ranks(**options: Any) -> Iterator[Callable[[int, str], Ranks]]:
    """Start ranks when they are asked for, by their number and layout, and keep them until the end."""
    with ExitStack() as stack:
        worlds: dict[tuple[int, str], Ranks] = {}

        def ranks(size: int, layout: str) -> Ranks:
            if (size, layout) not in worlds:
                worlds[size, layout] = stack.enter_context(Ranks(size, layout=layout, **options))
            return worlds[size, layout]

        yield ranks
