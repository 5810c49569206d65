"""A parameter server: the parameters are in rank 0, beside its own training, and others call it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shoal.distributed.world import World
from shoal.strategies.asynchronous.shared_parameters import Commons, SharedMemory, private
from shoal.strategies.rpc import RPCAgent
from shoal.util.errors import LaunchError, StepError

SERVER = 0


class ServerEndpoint:
    """This rank's end of a server: others may call it until all that live have come to close it."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._calls = world.service(RPCAgent)
        self._calls.serve(name, self, until_closed=True)

    def close(self) -> None:
        """Wait for all that live, unless this rank has failed, and answer no more."""
        if sys.exception() is None:
            with suppress(LaunchError):  # rank 0 has taken their store with it
                self._world.meet()


class Server(ServerEndpoint, Commons):
    """The parameters in rank 0, for its own worker and, by `answer`, for all others."""

    def __init__(self, like: Sequence[Tensor], world: World, name: str) -> None:
        super().__init__(world, name)
        self._memory = private(like, world)

    def put(self, values: Sequence[Tensor]) -> None:
        """As in any memory."""
        self._memory.put(values)

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """As in any memory."""
        return self._memory.read(into)

    def add(self, changes: Sequence[Tensor]) -> list[int]:
        """As in any memory."""
        return self._memory.add(changes)

    def tick(self) -> None:
        """As in any memory."""
        self._memory.tick()

    def clocks(self) -> list[int]:
        """As in any memory."""
        return self._memory.clocks()

    def answer(self, question: str, worker: int, changes: Sequence[Tensor]) -> Any:
        """What another worker asks for."""
        memory: SharedMemory = self._memory
        match question:
            case "read":
                before = memory.updates()
                return before, memory.values()
            case "add":
                return memory.add_for(worker, changes)
            case "tick":
                memory.tick_for(worker)
        return memory.clocks()


class Client(ServerEndpoint, Commons):
    """The same for any other rank."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._worker = world.rank

    def put(self, values: Sequence[Tensor]) -> None:
        """Nothing: rank 0 has put its own there, which all ranks have."""

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Ask for all of them."""
        before, values = self._ask("read")
        torch._foreach_copy_(list(into), values)
        return list(before)

    def add(self, changes: Sequence[Tensor]) -> list[int]:
        """Send them."""
        return list(self._ask("add", [change.cpu() for change in changes]))

    def tick(self) -> None:
        """Tell."""
        self._ask("tick")

    def clocks(self) -> list[int]:
        """Ask."""
        return list(self._ask("clocks"))

    def _ask(self, question: str, changes: Sequence[Tensor] = ()) -> Any:
        try:
            return self._calls.ask(SERVER, self._name, "answer", question, self._worker, list(changes))
        except (RuntimeError, StepError) as error:
            reason = error.found if isinstance(error, StepError) else str(error).splitlines()[0]
            raise StepError(
                given="shoal.Hogwild(…) with a parameter server in rank 0",
                found=f"it does not answer any more: {reason}",
                fix="see rank 0's own error; the same command goes on from the newest checkpoint",
            ) from None


def serve(like: Sequence[Tensor], world: World) -> Commons:
    """The parameters as this rank has them, by a server in rank 0. Collective."""
    name = world.broadcast(uuid.uuid4().hex)
    end = Server(like, world, name) if world.rank == SERVER else Client(world, name)
    world.before_closing(end.close)
    world.barrier()
    return end
