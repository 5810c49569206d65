"""The launcher of a run: starts elastic's agent, carries out its orders, tells the failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.env_vars import write_variables
from shoal.distributed.failure import Failure, explain, loss, preempted, report
from shoal.launcher import orphans
from shoal.launcher._cpython import stop_fork_server
from shoal.launcher.entry_point import EntryPoint
from shoal.launcher.logs import Logs
from shoal.launcher.nodes import Nodes, label
from shoal.launcher.signals import Interrupted
from shoal.launcher.worker_main import bind_to_launcher
from shoal.launcher.workers import GRACE, Workers, start_server, without_main
from shoal.util.errors import LaunchError

# What the agent may need to tell other nodes that this one was told to end.
_LEAVE = 2.0


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended: its exit code, the failure of its last attempt, or what ranks returned.

    `values` are in rank order, pickled; empty for a rank that returned nothing.
    """

    code: int = 0
    failure: Failure | None = None
    values: tuple[bytes, ...] = ()


class Launcher:
    """Carries out the orders of one run's agent.

    `logs`, if given, take what ranks write. `undisturbed()` makes a context in which no signal
    interrupts. With `nodes` this is one launcher of several, whose agents decide together.
    """

    def __init__(
        self,
        job: EntryPoint,
        *,
        processes: int,
        restarts: int,
        preemptions: int,
        port: int,
        grace: float | None,
        logs: Logs | None,
        undisturbed: Callable[[], AbstractContextManager[None]],
        nodes: Nodes | None = None,
    ) -> None:
        self._job = job
        self._processes = processes
        self._nodes = nodes
        self._restarts = restarts
        self._preemptions = preemptions
        self._failed = self._preempted = 0
        self._told = False
        self._grace = grace
        self._logs = logs
        self._undisturbed = undisturbed
        self._attempts = 0
        self._workers = Workers(job, [], None, self._tell_loss)
        self._ranks, self._size = range(processes), processes
        self._end = RunEnd()
        self._orphans = orphans.Orphans()
        context = multiprocessing.get_context("forkserver")
        self._orders, self._theirs = context.Pipe()
        self._agent = context.Process(
            target=_supervise,
            args=(self._theirs, processes, restarts, preemptions, port, nodes, label()),
            daemon=True,
        )

    def run(self) -> RunEnd:
        """Run all attempts. Raises Interrupted at a signal."""
        grace = self._short
        try:
            self._start_agent()
            end = self._obey()
            if not end.code:
                grace = orphans.GRACE if self._grace is None else self._grace
            return end
        except Interrupted as interrupted:
            try:
                self._leave(128 + interrupted.signum)
            finally:
                saved = self._workers.stop(interrupted.passed_on, self._grace)
            if self._nodes is not None and self._agent.is_alive():
                self._answer(None)  # it may go when the others have heard
                self._agent.join(2 * self._nodes.silence)
            if saved:
                return RunEnd(code=REQUEUE)
            if self._workers.over is not None and self._nodes is None:
                return RunEnd(values=self._workers.over)  # it was too late to end anything
            raise
        finally:
            try:
                self._workers.stop(signal.SIGKILL, 0.0)
                self._end_orphans(grace)
            finally:
                if self._agent.pid is not None:
                    self._agent.kill()
                    self._agent.join()
                self._orphans.release()
                stop_fork_server()

    def _end_orphans(self, grace: float) -> None:
        """Let processes that ranks left in their own sessions finish, then kill and report the rest."""
        found = ", ".join(map(orphans.name, self._orphans.left()))
        if not found:
            return
        _tell(f"shoal run: waiting up to {grace:g} s for processes that ranks left running: {found}\n")
        for name in self._orphans.end(grace):
            _tell(f"shoal run: {name} was still running after {grace:g} s, and was killed\n")

    def forward(self, signum: int) -> bool:
        """Pass a signal on to the ranks, which may end because of it; whether there are any."""
        self._told = True
        return self._workers.send(signum)

    def _start_agent(self) -> None:
        with self._undisturbed():
            start_server()
            self._orphans.adopt()
            try:
                with without_main():
                    self._agent.start()
            except (EOFError, OSError) as error:
                raise self._agent_lost(str(error)) from None
            self._theirs.close()

    def _obey(self) -> RunEnd:
        deeds: dict[str, Callable[[Any], object]] = {
            "start": self._start_workers,
            "watch": self._watch,
            "look": self._look,
            "pause": time.sleep,
            "stop": self._stop,
            "tell": _tell,
            "refuse": self._refuse,
        }
        limit: float | None = None
        while True:
            try:
                order, value = self._receive(limit)
            except (EOFError, ConnectionError):
                break
            answer = deeds[order](value)
            # An agent that looks at ranks has nothing else to do, unless it is cut off.
            limit = 3 * self._nodes.silence if self._nodes and order in ("look", "pause") else None
            self._answer(answer)
        self._agent.join()
        if self._agent.exitcode:
            raise self._agent_lost(f"exit code {self._agent.exitcode}")
        return self._end

    def _receive(self, limit: float | None) -> tuple[str, Any]:
        if not self._orders.poll(limit):
            self._workers.stop(signal.SIGTERM, self._short)
            raise LaunchError(
                given=f"a node of {self._job.name}",
                found=f"it has not heard from the others for {limit:g} s: it is cut off",
                fix="see to the network between the nodes, then start the command here again",
            )
        order, value = json.loads(self._orders.recv_bytes())
        return order, value

    def _answer(self, answer: object) -> None:
        # An agent that has died is noticed at its next order.
        with suppress(ConnectionError):
            self._orders.send_bytes(json.dumps(answer).encode())

    def _leave(self, code: int) -> None:
        """Have the agent tell other nodes, before the ranks go, that this one was told to end."""
        if self._nodes is None or not self._agent.is_alive():
            return
        self._answer({"leaving": code})
        deadline = time.monotonic() + _LEAVE
        with suppress(EOFError, ConnectionError):
            while self._orders.poll(max(0.0, deadline - time.monotonic())):
                if json.loads(self._orders.recv_bytes())[0] == "left":
                    return

    def _start_workers(self, variables: list[dict[str, str]]) -> list[int]:
        with self._undisturbed():
            self._attempts += 1
            self._end = RunEnd()
            first, self._size = int(variables[0]["RANK"]), int(variables[0]["WORLD_SIZE"])
            self._ranks = range(first, first + len(variables))
            files = None
            if self._logs is not None:
                attempts = self._restarts + self._preemptions + 1
                self._logs.begin(self._attempts, attempts, self._job.name)
                files = self._logs.files
            self._workers = Workers(self._job, variables, files, self._tell_loss)
            pids = self._workers.start()
            self._orphans.expect(pids)
            return pids

    def _agent_lost(self, why: str) -> LaunchError:
        return LaunchError(
            given=f"{self._processes} processes of {self._job.name}",
            found=f"torch elastic's agent ended ({why}), for the reason printed above, if any",
            fix="try `python -c 'import torch.distributed.elastic.agent.server.api'`",
        )

    def _watch(self, _: object) -> str:
        """Wait for the end of an attempt; stops what is left of it and tells why.

        What the agent has to know: "over", "failed", or "preempted" where that is to be followed by
        another attempt.
        """
        failures = self._workers.wait(self._grace)
        if not failures:
            self._end = RunEnd(values=tuple(self._workers.values()))
            return "over"
        failure = explain(failures, self._workers.left(), size=self._size)
        again = self._preempted < self._preemptions and not self._told
        if preempted(failures):
            self._preempted += 1
            text = f"preemption {self._preempted} of {self._preemptions}\n" if again else ""
        else:
            self._failed += 1
            text = report(failure, size=self._processes)
            if self._failed <= self._restarts:
                text += f"restart {self._failed} of {self._restarts}\n"
        self._stop_and_tell(self._short, failure, text)
        self._end = RunEnd(code=failure.code, failure=failure)
        if preempted(failures):
            return "preempted" if again else "over"
        return "failed"

    @property
    def _short(self) -> float:
        """The grace where nobody can save any more: GRACE is enough for all else."""
        return GRACE if self._grace is None else min(GRACE, self._grace)

    def _look(self, seconds: float) -> dict[str, Any] | None:
        """The failure, if any, of ranks that have ended within so many seconds; None while they run."""
        failures = self._workers.wait(self._grace, seconds)
        if failures is None:
            return None
        left = self._workers.left()
        failure = explain(failures, left, size=self._size) if failures else None
        self._end = RunEnd(failure=failure)
        return {"failure": failure and asdict(failure), "told": self._told}

    def _stop(self, end: tuple[int, str, bool, bool]) -> None:
        """Stop what is left of an attempt and tell its failure here, if any, and then a text.

        Ranks have time to save where they all can. An error that reads as a peer's death is told only
        where nothing better is known.
        """
        code, text, saving, first = end
        failure = self._end.failure
        if failure is not None and (failure.code == REQUEUE or (failure.by_peer and not first)):
            failure = None
        if failure is not None:
            text = report(failure, size=self._size) + text
        left = self._stop_and_tell(self._grace if saving else self._short, failure, text)
        self._end = RunEnd(code=REQUEUE if left and code else code, failure=failure)

    def _stop_and_tell(self, grace: float | None, failure: Failure | None, text: str) -> bool:
        """Stop what is left of an attempt and tell why; whether ranks left to be started again."""
        rank = self._ranks.start if failure is None else failure.rank
        first = failure is not None and failure.hung
        if first:  # a rank that hangs may use up all of its grace, and the others have ended
            self._tell_of(rank, text)
        try:
            saved = self._workers.stop(signal.SIGTERM, grace)
            self._end_orphans(self._short)
            return saved
        finally:
            # Last on the screen, also for those who press Ctrl-C while the others are stopped.
            if not first:
                self._tell_of(rank, text)

    def _tell_of(self, rank: int, text: str) -> None:
        """Tell how an attempt ended on the screen, and in the file of the rank that was first."""
        if self._logs is not None:
            # That of a hang may be on another machine.
            self._logs.append(self._ranks.index(rank) if rank in self._ranks else 0, text)
        _tell(text)

    def _tell_loss(self, failure: Failure) -> None:
        self._tell_of(failure.rank, loss(failure, size=self._size))

    def _refuse(self, error: tuple[str, str, str]) -> None:
        self._workers.stop(signal.SIGTERM, self._short)
        given, found, fix = error
        raise LaunchError(given=given, found=found, fix=fix)


def _tell(text: str) -> None:
    """Print on stderr, unless nobody reads any more: that changes no restart and no exit code."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        # At its end Python would write what is left in the buffer, and fail again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


def _supervise(
    orders: Connection,
    processes: int,
    restarts: int,
    preemptions: int,
    port: int,
    nodes: Nodes | None,
    label: str,
) -> None:
    """Be the agent's process; here, where the launcher can name it without importing torch."""
    # It ends when the launcher says so.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    bind_to_launcher()
    if nodes is None:
        from shoal.launcher.elastic_agent import supervise

        supervise(orders, processes=processes, restarts=restarts, port=port)
    else:
        from shoal.launcher import multi_node_agent

        write_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        multi_node_agent.supervise(
            orders,
            processes=processes,
            restarts=restarts,
            preemptions=preemptions,
            nodes=nodes,
            label=label,
        )
