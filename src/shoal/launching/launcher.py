"""The launcher of a run: starts elastic's agent, carries out its orders, tells the failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..errors import LaunchError
from ..launchers import REQUEUE
from .failure import Failure, culprit, preempted, report
from .job import Job
from .logs import Logs
from .processes import GRACE, Workers, start_server, without_main
from .signals import Interrupted
from .worker import bind_to_launcher


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended: its exit code, the failure of its last attempt, or what ranks returned.

    `values` are in rank order, pickled; empty for a rank that returned nothing.
    """

    code: int = 0
    failure: Failure | None = None
    values: tuple[bytes, ...] = ()


class Launcher:
    """Carries out the orders of one run's agent.

    `logs`, if given, take what ranks write. `undisturbed()` makes a context in which no signal
    interrupts.
    """

    def __init__(
        self,
        job: Job,
        *,
        processes: int,
        restarts: int,
        preemptions: int,
        port: int,
        grace: float | None,
        logs: Logs | None,
        undisturbed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._job = job
        self._processes = processes
        self._restarts = restarts
        self._preemptions = preemptions
        self._failed = self._preempted = 0
        self._told = False
        self._grace = grace
        self._logs = logs
        self._undisturbed = undisturbed
        self._attempts = 0
        self._workers = Workers(job, [], None)
        context = multiprocessing.get_context("forkserver")
        self._orders, self._theirs = context.Pipe()
        self._agent = context.Process(
            target=_supervise, args=(self._theirs, processes, restarts, port), daemon=True
        )

    def run(self) -> End:
        """Run all attempts. Raises Interrupted at a signal."""
        try:
            self._start_agent()
            return self._obey()
        except Interrupted as interrupted:
            if self._workers.stop(interrupted.passed_on, self._grace):
                return End(code=REQUEUE)
            raise
        finally:
            self._workers.stop(signal.SIGKILL, 0.0)
            if self._agent.pid is not None:
                self._agent.kill()
                self._agent.join()

    def forward(self, signum: int) -> bool:
        """Pass a signal on to the ranks, which may end because of it; whether there are any."""
        self._told = True
        return self._workers.send(signum)

    def _start_agent(self) -> None:
        with self._undisturbed():
            start_server()
            try:
                with without_main():
                    self._agent.start()
            except (EOFError, OSError) as error:
                raise self._agent_lost(str(error)) from None
            self._theirs.close()

    def _obey(self) -> End:
        end = End()
        while True:
            try:
                variables = json.loads(self._orders.recv_bytes())
            except (EOFError, ConnectionError):
                break
            answer: object
            if variables is None:
                end, answer = self._watch()
            else:
                answer = self._start_workers(variables)
            with suppress(ConnectionError):
                # An agent that has died is noticed above.
                self._orders.send_bytes(json.dumps(answer).encode())
        self._agent.join()
        if self._agent.exitcode:
            raise self._agent_lost(f"exit code {self._agent.exitcode}")
        return end

    def _start_workers(self, variables: list[dict[str, str]]) -> list[int]:
        with self._undisturbed():
            self._attempts += 1
            files = None
            if self._logs is not None:
                attempts = self._restarts + self._preemptions + 1
                self._logs.begin(self._attempts, attempts, self._job.name)
                files = self._logs.files
            self._workers = Workers(self._job, variables, files)
            return self._workers.start()

    def _agent_lost(self, why: str) -> LaunchError:
        return LaunchError(
            given=f"{self._processes} processes of {self._job.name}",
            found=f"torch elastic's agent ended ({why}), for the reason printed above, if any",
            fix="try `python -c 'import torch.distributed.elastic.agent.server.api'`",
        )

    def _watch(self) -> tuple[End, str]:
        """Wait for the end of an attempt; stops what is left of it and tells why.

        With what the agent has to know: "over", "failed", or "preempted" where that is to be followed
        by another attempt.
        """
        failures = self._workers.wait(self._grace)
        if not failures:
            return End(values=tuple(self._workers.values())), "over"
        failure = culprit(failures)
        again = self._preempted < self._preemptions and not self._told
        try:
            # When one has failed nobody can save any more, and GRACE is enough for all else.
            grace = GRACE if self._grace is None else min(GRACE, self._grace)
            self._workers.stop(signal.SIGTERM, grace)
        finally:
            # Last on the screen, also for those who press Ctrl-C while the others are stopped.
            if preempted(failures):
                self._preempted += 1
                text = f"preemption {self._preempted} of {self._preemptions}\n" if again else ""
            else:
                self._failed += 1
                text = report(failure, size=self._processes)
                if self._failed <= self._restarts:
                    text += f"restart {self._failed} of {self._restarts}\n"
            if self._logs is not None:
                self._logs.append(failure.rank, text)
            _tell(text)
        end = End(code=failure.code, failure=failure)
        if preempted(failures):
            return end, "preempted" if again else "over"
        return end, "failed"


def _tell(text: str) -> None:
    """Print on stderr, unless nobody reads any more: that changes no restart and no exit code."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        # At its end Python would write what is left in the buffer, and fail again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


def _supervise(orders: Connection, processes: int, restarts: int, port: int) -> None:
    """Be the agent's process; here, where the launcher can name it without importing torch."""
    # It ends when the launcher says so.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    bind_to_launcher()
    from .elastic import supervise

    supervise(orders, processes=processes, restarts=restarts, port=port)
