"""The launcher of a run: starts elastic's agent, carries out its orders, reports the failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
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
from shoal.launcher.failure_history import FailureHistory
from shoal.launcher.logs import Logs
from shoal.launcher.nodes import Nodes, label
from shoal.launcher.signals import Interrupted
from shoal.launcher.worker_main import bind_to_launcher
from shoal.launcher.workers import GRACE, Workers, start_server, without_main
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError
from shoal.util.packages import missing_package

# Seconds that the agent may need to notify other nodes that this one received a signal to end.
_LEAVE = 2.0


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run: its exit code, and the failure of its last attempt or the results of the ranks.

    `values` are in rank order, pickled; empty for a rank without a result.
    """

    code: int = 0
    failure: Failure | None = None
    values: tuple[bytes, ...] = ()


class Launcher:
    """Carries out the orders of one run's agent.

    `logs`, if given, receive the output of the ranks. `undisturbed(*signals)` returns a context in
    which these signals, or all without arguments, do not interrupt. With `nodes` this is one launcher
    of several, whose agents decide together. With `keep_server`, the fork server stays for other runs.
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
        undisturbed: Callable[..., AbstractContextManager[None]],
        nodes: Nodes | None = None,
        keep_server: bool = False,
    ) -> None:
        self._job = job
        self._keep_server = keep_server
        self._processes = processes
        self._nodes = nodes
        self._restarts = restarts
        self._preemptions = preemptions
        self._failed = self._preempted = 0
        self._history = FailureHistory()
        self._begun = 0.0
        self._told = False
        self._saved = False
        """Whether the ranks of the last attempt left to be restarted when they were stopped."""
        self._resumes = False
        """Whether the next attempt, after a wait, resumes a Run: a signal then has nothing to save."""
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
                saved = self._workers.stop(interrupted.passed_on, self._grace) or self._saved
            if self._nodes is not None and self._agent.is_alive():
                self._answer(None)  # it may end when the others have read it
                self._agent.join(2 * self._nodes.silence)
            if saved or (self._resumes and interrupted.signum != signal.SIGINT):
                return RunEnd(code=REQUEUE)
            if self._workers.over is not None and self._nodes is None:
                return RunEnd(values=self._workers.over)  # the signal came after the end
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
                if not self._keep_server:
                    stop_fork_server()

    def _end_orphans(self, grace: float) -> None:
        """Let processes that ranks left in their own sessions finish, then kill and report the rest."""
        found = ", ".join(map(orphans.name, self._orphans.left()))
        if not found:
            return
        _tell(f"shoal run: waiting up to {grace:g} s for processes that ranks left running: {found}\n")
        for name in self._orphans.end(grace):
            _tell(f"shoal run: {name} was still running after {grace:g} s and was killed\n")

    def forward(self, signum: int) -> bool:
        """Forward a signal to the ranks, which may end because of it; return whether there are any."""
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
            "pause": CLOCK.sleep,
            "wait": CLOCK.sleep,  # other nodes may take long to join after it
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
            # An agent that watches ranks needs no time limit, unless it is cut off.
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
                found=f"it has received no message from the others for {limit:g} s: it is cut off",
                fix="check the network between the nodes, then run the command again on this node",
            )
        order, value = json.loads(self._orders.recv_bytes())
        return order, value

    def _answer(self, answer: object) -> None:
        # The death of an agent is noticed at its next order.
        with suppress(ConnectionError):
            self._orders.send_bytes(json.dumps(answer).encode())

    def _leave(self, code: int) -> None:
        """Let the agent notify other nodes, before the ranks end, that this one received a signal to
        end.
        """
        if self._nodes is None or not self._agent.is_alive():
            return
        self._answer({"leaving": code})
        deadline = CLOCK.now() + _LEAVE
        with suppress(EOFError, ConnectionError):
            while self._orders.poll(max(0.0, deadline - CLOCK.now())):
                if json.loads(self._orders.recv_bytes())[0] == "left":
                    return

    def _start_workers(self, variables: list[dict[str, str]]) -> list[int]:
        with self._undisturbed():
            self._attempts += 1
            self._resumes = self._saved = False
            self._begun = CLOCK.now()
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
            found=f"torch elastic's agent ended ({why}); the reason is printed above, if known",
            fix="try `python -c 'import torch.distributed.elastic.agent.server.api'`",
        )

    def _watch(self, _: object) -> str:
        """Wait for the end of an attempt, stop its remaining ranks, report why, and wait for a fault
        that may pass.

        Return the result for the agent: "over", "failed", "final" if no attempt may follow the failure,
        or "preempted" if another attempt should follow.
        """
        failures = self._workers.wait(self._grace)
        if not failures:
            self._end = RunEnd(values=tuple(self._workers.values()))
            return "over"
        failure, history = explain(failures, self._workers.left(), size=self._size), self._history
        again = self._preempted < self._preemptions and not self._told
        if preempted(failures):
            self._preempted += 1
            text = f"preemption {self._preempted} of {self._preemptions}\n" if again else ""
        else:
            left, ran = self._restarts - self._failed, CLOCK.now() - self._begun
            self._history = history = history.after(failure, restarts=left, ran=ran)
            self._failed += 1
            self._resumes = history.resumes
            text = report(failure, size=self._processes) + history.tell(self._failed, self._restarts)
        self._stop_and_tell(self._short, failure, text)
        self._end = RunEnd(code=failure.code, failure=failure)
        if preempted(failures):
            return "preempted" if again else "over"
        CLOCK.sleep(history.wait)
        return "final" if history.end else "failed"

    @property
    def _short(self) -> float:
        """The grace period if no rank can save any more: GRACE is enough for all else."""
        return GRACE if self._grace is None else min(GRACE, self._grace)

    def _look(self, seconds: float) -> dict[str, Any] | None:
        """Return the failure of ranks that have ended within this many seconds, if any; None while they
        run.
        """
        failures = self._workers.wait(self._grace, seconds)
        if failures is None:
            return None
        left = self._workers.left()
        failure = explain(failures, left, size=self._size) if failures else None
        self._end = RunEnd(failure=failure)
        return {"failure": failure and asdict(failure), "told": self._told}

    def _stop(self, end: tuple[int, str, bool, bool, bool]) -> None:
        """Stop the remaining ranks of an attempt and report its failure here, if any, and then a text.

        Ranks have time to save if they all can. An error that looks like a peer's death is reported
        only if no better cause is known.
        """
        code, text, saving, first, self._resumes = end
        failure = self._end.failure
        if failure is not None and (failure.code == REQUEUE or (failure.by_peer and not first)):
            failure = None
        if failure is not None:
            text = report(failure, size=self._size) + text
        # If this node gets a signal too, the ranks must still save: Interrupted would kill them.
        with self._undisturbed(signal.SIGTERM, signal.SIGHUP):
            self._saved = self._stop_and_tell(self._grace if saving else self._short, failure, text)
        self._end = RunEnd(code=REQUEUE if self._saved and code else code, failure=failure)

    def _stop_and_tell(self, grace: float | None, failure: Failure | None, text: str) -> bool:
        """Stop the remaining ranks and report why; return whether ranks left to be restarted."""
        rank = self._ranks.start if failure is None else failure.rank
        first = failure is not None and failure.hung
        if first:  # a rank that hangs may use its full grace period, while the others have ended
            self._tell_of(rank, text)
        try:
            saved = self._workers.stop(signal.SIGTERM, grace)
            self._end_orphans(self._short)
            return saved
        finally:
            # Last on the terminal, even after a Ctrl-C while the others are stopped.
            if not first:
                self._tell_of(rank, text)

    def _tell_of(self, rank: int, text: str) -> None:
        """Report how an attempt ended on the terminal, and in the file of the rank that was first."""
        if self._logs is not None:
            # The rank that caused a hang may be on another machine.
            self._logs.append(self._ranks.index(rank) if rank in self._ranks else 0, text)
        _tell(text)

    def _tell_loss(self, failure: Failure) -> None:
        self._tell_of(failure.rank, loss(failure, size=self._size))

    def _refuse(self, error: dict[str, str]) -> None:
        self._workers.stop(signal.SIGTERM, self._short)
        raise LaunchError(**error)


def _tell(text: str) -> None:
    """Print on stderr. If its reader has ended, that changes no restart and no exit code."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        # When Python exits, it would write the rest of the buffer, and fail again.
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
    """Run the agent's process; it is here so that the launcher need not import torch to refer to it."""
    # It ends when the launcher ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    bind_to_launcher()
    try:
        from shoal.launcher.elastic_agent import supervise
    except (ImportError, OSError) as error:
        missing = missing_package(error)
        if missing is None:
            raise
        orders.send_bytes(json.dumps(["refuse", missing.texts]).encode())
        return
    if nodes is None:
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
