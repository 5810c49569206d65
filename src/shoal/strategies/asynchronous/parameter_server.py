"""A parameter server: the parameters are in rank 0, which trains too, and others call it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from shoal._torch import foreach
from shoal.distributed.world import World
from shoal.strategies.asynchronous.shared_parameters import Commons, private
from shoal.strategies.rpc import RPCAgent
from shoal.util.errors import LaunchError, StepError

SERVER = 0


class Farewell:
    """Lets other ranks call this one until all that live have come to close their world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def close(self) -> None:
        """Wait for all that live, unless this rank has failed."""
        if sys.exception() is None:
            with suppress(LaunchError):  # rank 0 has taken their store with it
                self._world.membership.meet()


class Client(Commons):
    """The parameters in rank 0, as any other rank reaches them."""

    def __init__(self, calls: RPCAgent, name: str, worker: int) -> None:
        self._calls = calls
        self._name = name
        self._worker = worker

    def put(self, values: Sequence[Tensor]) -> None:
        """Nothing: rank 0 has put its own there, which all ranks have."""

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Ask for all of them."""
        before, values = self._ask("snapshot")
        foreach.copy_(list(into), values)
        return list(before)

    def add(self, changes: Sequence[Tensor]) -> list[int]:
        """Send them."""
        return list(self._ask("add_for", self._worker, [change.cpu() for change in changes]))

    def tick(self) -> None:
        """Tell."""
        self._ask("tick_for", self._worker)

    def clocks(self) -> list[int]:
        """Ask."""
        return list(self._ask("clocks"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._calls.ask(SERVER, self._name, method, *arguments)
        except (RuntimeError, StepError) as error:
            reason = error.found if isinstance(error, StepError) else str(error).splitlines()[0]
            raise StepError(
                given="shoal.Hogwild(…) with a parameter server in rank 0",
                found=f"it does not answer any more: {reason}",
                fix="see rank 0's own error; the same command goes on from the newest checkpoint",
            ) from None


def serve(like: Sequence[Tensor], world: World) -> Commons:
    """Return the parameters as this rank reaches them: in the memory of rank 0. Collective."""
    calls = world.service(RPCAgent)
    name = world.broadcast(uuid.uuid4().hex)
    server = world.rank == SERVER
    commons = private(like, world) if server else Client(calls, name, world.rank)
    farewell = Farewell(world)
    calls.serve(name, commons)
    calls.keep(commons, farewell)  # others may call when the model is done with here
    world.before_closing(farewell.close)
    world.barrier()
    return commons
