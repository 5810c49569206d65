"""Parameter server: rank 0 holds the parameters, and also trains. Other ranks call it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from shoal._torch import foreach
from shoal.distributed.world import World
from shoal.strategies.asynchronous.shared_parameters import ParameterStorage, private
from shoal.strategies.rpc import RPCAgent
from shoal.util.errors import LaunchError, StepError

SERVER = 0


class PeerService:
    """Service that lets other ranks call this one until all live ranks close their world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def close(self) -> None:
        """Wait for all live ranks, unless this rank has failed."""
        if sys.exception() is None:
            with suppress(LaunchError):  # rank 0 hosted the store, and has ended
                self._world.membership.meet()


class Client(ParameterStorage):
    """Access to the parameters on rank 0 from another rank."""

    def __init__(self, calls: RPCAgent, name: str) -> None:
        self._calls = calls
        self._name = name

    def put(self, values: Sequence[Tensor]) -> None:
        """Do nothing: rank 0 has stored its parameters, which are the same on all ranks."""

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Request all parameters; see the contract."""
        before, values = self._ask("snapshot")
        foreach.copy_(list(into), values)
        return list(before)

    def add(self, worker: int, changes: Sequence[Tensor]) -> list[int]:
        """Send the changes; see the contract."""
        return list(self._ask("add", worker, [change.cpu() for change in changes]))

    def tick(self, worker: int) -> None:
        """Send the step; see the contract."""
        self._ask("tick", worker)

    def clocks(self) -> list[int]:
        """Request the numbers of steps; see the contract."""
        return list(self._ask("clocks"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._calls.ask(SERVER, self._name, method, *arguments)
        except (RuntimeError, StepError) as error:
            reason = error.found if isinstance(error, StepError) else str(error).splitlines()[0]
            raise StepError(
                given="shoal.Hogwild(…) with a parameter server on rank 0",
                found=f"the server does not answer any more: {reason}",
                fix="see the error of rank 0; the same command resumes from the latest complete "
                "checkpoint",
            ) from None


def serve(like: Sequence[Tensor], world: World) -> ParameterStorage:
    """Return this rank's access to the parameters in the memory of rank 0. Collective."""
    calls = world.service(RPCAgent)
    name = world.broadcast(uuid.uuid4().hex)
    server = world.rank == SERVER
    commons = private(like, world) if server else Client(calls, name)
    farewell = PeerService(world)
    calls.serve(name, commons)
    calls.keep(commons, farewell)  # others may call after this rank has deleted the model
    world.before_closing(farewell.close)
    world.barrier()
    return commons
