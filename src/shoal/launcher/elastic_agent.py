"""torch elastic as a library: its agent and restarts, over processes that have torch loaded.

Elastic's own local agent waits half a minute for stuck ranks, which can't be configured, and leaves
files behind. This one implements the four abstract methods of elastic's agents. It runs in a separate
process, so that torch is imported once for all and never by the launcher.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shoal._torch.elastic import ElasticAgent
from shoal.distributed.cluster_env import RUN_ID
from shoal.distributed.env_vars import ports, worker_variables
from shoal.distributed.placement import PORTS
from shoal.launcher.nodes import listen
from shoal.util.errors import LaunchError

_ADDRESS = "127.0.0.1"


LONGEST = 300.0
"""How many seconds a store waits for a value, as torch's own do."""


def serve(server: socket.socket, host: str, timeout: float) -> TCPStore:
    """Return a store that listens on `server` only; torch's own would listen on all interfaces."""
    return TCPStore(
        host,
        server.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
        use_libuv=False,  # libuv does not accept a socket
    )


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one machine with itself: a new store for each attempt.

    Elastic reuses one store. Gloo then reads the addresses that ranks of the failed attempt left there,
    and no restart succeeds.
    """

    def __init__(self, port: int, *, processes: int) -> None:
        self._port = port
        self._processes = processes
        self._server: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to the launcher's store, which survives the death of any rank."""
        return self._processes > 1

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "local"

    def get_run_id(self) -> str:
        """Return the name of this run."""
        return RUN_ID

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the next attempt's store."""
        # First close the previous store, which holds the port.
        self._server = None
        server = listen(_ADDRESS, *((self._port,) if self._port else ports()))
        if isinstance(server, str):
            raise LaunchError(
                given=f"a rendezvous of {self._processes} process(es) at {_ADDRESS}",
                found=server,
                fix=f"leave --port out; or give more ports: export {PORTS}=10001-20000",
            )
        meeting = RendezvousStoreInfo(_ADDRESS, server.getsockname()[1])
        if self._processes == 1:
            server.close()  # a single rank needs no store, and may create its own there
        else:
            self._server = serve(server, _ADDRESS, LONGEST)
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=meeting)

    def is_closed(self) -> bool:
        """Return False, since no other node can close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing, since there is no other node to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0, since no other machine can join."""
        return 0

    def shutdown(self) -> bool:
        """Close the store."""
        self._server = None
        return True


class Agent(ElasticAgent):
    """TorchElastic agent that only makes decisions, and sends them to the launcher to carry out.

    The launcher stops the remaining ranks of an attempt before it reports the failure, so that the
    agent has none to stop.
    """

    def __init__(
        self, handler: RendezvousHandler, orders: Connection, *, processes: int, restarts: int
    ) -> None:
        super().__init__(
            WorkerSpec(
                role="rank",
                local_world_size=processes,
                rdzv_handler=handler,
                entrypoint="script",
                max_restarts=restarts,
                monitor_interval=0.001,  # the launcher itself waits, without polling
            )
        )
        self._orders = orders
        self._preemptions = 0

    @staticmethod
    def order(orders: Connection, order: str, value: object) -> Any:
        """Send an order and return the answer."""
        orders.send_bytes(json.dumps([order, value]).encode())
        return json.loads(orders.recv_bytes())

    def ask(self, order: str, value: object) -> Any:
        """Send the launcher an order and return its answer."""
        return self.order(self._orders, order, value)

    @property
    def attempt_number(self) -> int:
        """Return how many times ranks have been started before."""
        return self.restarts_used + self._preemptions

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        variables = [
            worker_variables(
                rank=worker.global_rank,
                size=worker.world_size,
                local_rank=worker.local_rank,
                local_size=spec.local_world_size,
                node=cast(int, worker_group.group_rank),
                nodes=cast(int, worker_group.group_world_size),
                run_id=spec.rdzv_handler.get_run_id(),
                address=cast(str, worker_group.master_addr),
                port=cast(int, worker_group.master_port),
                attempt=self.attempt_number,
                restarts=spec.max_restarts,
                store=spec.rdzv_handler.use_agent_store,
            )
            for worker in worker_group.workers
        ]
        return dict(enumerate(self.ask("start", variables)))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self.ask("watch", None)
        if ended == "preempted":
            # The launcher counts these; elastic is about to subtract one from its restarts.
            self._preemptions += 1
            self.grant_restart()
        elif ended == "final":
            self.end_restarts()
        if ended != "over":
            return RunResult(state=WorkerState.FAILED)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        pass

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 0,
        is_restart: bool = False,
    ) -> None:
        # The options of elastic differ between versions.
        pass

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        # Elastic's own method looks up this host's full name for each event, for a log that is
        # switched off. That takes seconds if DNS stalls.
        return Event(state, source)


def supervise(orders: Connection, *, processes: int, restarts: int, port: int) -> None:
    """Order attempts until one succeeds or the restarts are used up."""
    handler = LocalRendezvous(port, processes=processes)
    try:
        with quiet():
            Agent(handler, orders, processes=processes, restarts=restarts).run()
    except LaunchError as error:
        Agent.order(orders, "refuse", error.texts)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress elastic's own messages, since the report contains all that they say."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
