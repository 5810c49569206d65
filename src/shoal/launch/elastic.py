"""Torch elastic as a library: its agent and restarts, over processes that have torch loaded.

Elastic's own local agent hard-codes half a minute of waiting for ranks that are stuck, and leaves
files behind. This one fills in the four methods that elastic leaves open to agents.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
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

from ..environ import RUN_ID, worker_variables
from .failure import Failure, culprit, report
from .processes import Workers
from .signals import Interrupted
from .worker import Script

_ADDRESS = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """The meeting of one machine with itself: a new store for each attempt.

    Elastic reuses one store. Gloo then reads the addresses that ranks of the dead attempt left
    there, and no restart succeeds.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the store in the launcher, so no rank's death takes it away."""
        return True

    def get_backend(self) -> str:
        """Name this rendezvous."""
        return "local"

    def get_run_id(self) -> str:
        """Name this run."""
        return RUN_ID

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the next attempt's store."""
        # First close the last one's, which holds the port.
        self._server = None
        self._server = TCPStore(_ADDRESS, self._port, is_master=True, wait_for_workers=False)
        meeting = RendezvousStoreInfo(_ADDRESS, self._server.port)
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=meeting)

    def is_closed(self) -> bool:
        """Nobody else can close it."""
        return False

    def set_closed(self) -> None:
        """Nobody else needs to know."""

    def num_nodes_waiting(self) -> int:
        """No other machine can join."""
        return 0

    def shutdown(self) -> bool:
        """Close the store."""
        self._server = None
        return True


class Agent(SimpleElasticAgent):
    """Elastic's agent over `Workers`; reports each attempt's first failure on stderr.

    `undisturbed()` makes a context in which no signal interrupts the launcher.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        script: Script,
        *,
        grace: float,
        undisturbed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(spec)
        self._script = script
        self._grace = grace
        self._undisturbed = undisturbed
        self._workers: Workers | None = None
        self.failure: Failure | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        variables = [
            worker_variables(
                rank=worker.global_rank,
                size=worker.world_size,
                local_rank=worker.local_rank,
                local_size=spec.local_world_size,
                address=cast(str, worker_group.master_addr),
                port=cast(int, worker_group.master_port),
                attempt=self._attempt(spec),
                restarts=spec.max_restarts,
            )
            for worker in worker_group.workers
        ]
        with self._undisturbed():
            self._workers = Workers(self._script, variables)
            return dict(enumerate(self._workers.start()))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._workers is None:
            return RunResult(state=WorkerState.UNKNOWN)
        try:
            failures = self._workers.wait()
        except Interrupted as interrupted:
            # Here and not in `_shutdown`, which would hear of SIGTERM whatever the signal was.
            self._workers.stop(interrupted.passed_on, self._grace)
            raise
        if not failures:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        self.failure = culprit(failures)
        try:
            self._workers.stop(signal.SIGTERM, self._grace)
        finally:
            # Last on the screen, also for those who press Ctrl-C while the others are stopped.
            self._report(self.failure, worker_group)
        return RunResult(state=WorkerState.FAILED)

    def _report(self, failure: Failure, group: WorkerGroup) -> None:
        text = report(failure, size=group.workers[0].world_size)
        if self._remaining_restarts:
            text += f"restart {self._attempt(group.spec) + 1} of {group.spec.max_restarts}\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    def _attempt(self, spec: WorkerSpec) -> int:
        return int(spec.max_restarts - self._remaining_restarts)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._shutdown()

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 0,
        is_restart: bool = False,
    ) -> None:
        # The options are elastic's, which differ from version to version.
        if self._workers is not None:
            self._workers.stop(death_sig, self._grace)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        # Elastic's own looks up this host's full name for each event, which takes seconds where
        # the domain name service stalls, for a log that is switched off.
        return Event(state, source)


def launch(
    script: Script,
    *,
    processes: int,
    restarts: int,
    port: int,
    grace: float,
    undisturbed: Callable[[], AbstractContextManager[None]],
) -> int:
    """Run `script` in `processes` ranks of this machine; returns the exit code."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=processes,
        rdzv_handler=LocalRendezvous(port),
        entrypoint=script.path,
        max_restarts=restarts,
        monitor_interval=0.001,  # the agent itself waits without polling
    )
    agent = Agent(spec, script, grace=grace, undisturbed=undisturbed)
    with _quiet():
        result = agent.run()
    return agent.failure.code if result.is_failed() and agent.failure is not None else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep elastic's own messages from the screen: everything it knows is in the report."""
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
