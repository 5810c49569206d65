"""Elastic's agent on one of several nodes: watches its ranks, its peers, and joining nodes."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from shoal.distributed.failure import Failure
from shoal.launcher.attempt_outcome import AttemptOutcome, Kind, NodeReport, decide_outcome, may_restart
from shoal.launcher.elastic_agent import Agent, quiet
from shoal.launcher.failure_history import FailureHistory
from shoal.launcher.multi_node_rendezvous import BEAT, ClosedError, NodeAttempt, NodesRendezvous
from shoal.launcher.nodes import Nodes
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

_LOOK = 0.1
"""Seconds between two checks of ranks and peers."""


class NodeExit(BaseException):
    """An exception for a signal to end this node, with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class NodesAgent(Agent):
    """Elastic's agent, with an end of each attempt that all nodes agree on."""

    def __init__(
        self,
        rendezvous: NodesRendezvous,
        orders: Connection,
        nodes: Nodes,
        *,
        processes: int,
        restarts: int,
        preemptions: int,
        label: str,
    ) -> None:
        super().__init__(rendezvous, orders, processes=processes, restarts=restarts)
        self._rendezvous_handler = rendezvous
        self._nodes = nodes
        self._label = label
        self._budgets: dict[Kind, int] = {"failed": restarts, "preempted": preemptions}
        self._begin()
        self.verdict: AttemptOutcome | None = None
        self._history = FailureHistory()

    def _begin(self) -> None:
        self._begun = CLOCK.now()
        self._failure: Failure | None = None
        self._seen_at = 0.0
        self._finished = self._told = False
        self._counts = {kind: self._rendezvous_handler.count(kind) for kind in self._budgets}

    def ask(self, order: str, value: object) -> Any:
        """Send the launcher an order and return its answer. Raises Leaving if it received a signal to
        end.
        """
        answer = super().ask(order, value)
        if isinstance(answer, dict) and "leaving" in answer:
            raise NodeExit(answer["leaving"])
        return answer

    @property
    def _attempt(self) -> NodeAttempt:
        if self._rendezvous_handler.attempt is None:
            raise RuntimeError("there is no attempt before the first rendezvous")
        return self._rendezvous_handler.attempt

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # Elastic's own method exchanges facts known already, and waits for nodes that have died since.
        attempt = self._attempt
        return [
            Worker(
                local_rank=local,
                global_rank=attempt.first_rank + local,
                role_rank=attempt.first_rank + local,
                world_size=attempt.size,
                role_world_size=attempt.size,
            )
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._attempt
        self._begin()
        if attempt.node == 0:
            labels = self._rendezvous_handler.labels(attempt.nodes)
            names = ", ".join(labels.get(node, node) for node in attempt.nodes)
            self.ask("tell", f"{len(attempt.nodes)} node(s), {attempt.size} rank(s): {names}\n")
        return super()._start_workers(worker_group)

    @property
    def attempt_number(self) -> int:
        """Return the attempt number: the same on all nodes, and never used twice."""
        return self._attempt.number

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_at_ranks()
        attempt = self._attempt
        verdict = attempt.verdict()
        mine = False
        if verdict is None:
            seen = self._look_around()
            wanted = decide_outcome(seen, patience=self._nodes.silence + 2 * BEAT)
            if wanted is None:
                return RunResult(state=WorkerState.HEALTHY)
            verdict = attempt.propose(wanted)
            mine = verdict == wanted
        return self._carry_out(verdict, mine, worker_group)

    def _look_at_ranks(self) -> None:
        if self._finished or self._failure is not None:
            self.ask("pause", _LOOK)
            return
        answer = self.ask("look", _LOOK)
        if answer is None:
            return
        if answer["failure"]:
            self._failure, self._seen_at = Failure(**answer["failure"]), CLOCK.now()
            self._told = answer["told"]
        else:
            self._finished = True
            self._attempt.finish()

    def _look_around(self) -> NodeReport:
        attempt, handler = self._attempt, self._rendezvous_handler
        present, waiting = handler.look()
        changed = [*waiting, *(node for node in attempt.nodes if node not in present)]
        return NodeReport(
            me=handler.me,
            nodes=attempt.nodes,
            present=present,
            waiting=waiting,
            labels={**handler.labels(changed), handler.me: self._label},
            done=attempt.finished(),
            failure=self._failure,
            told=self._told,
            ran=CLOCK.now() - self._begun,
            restarts=self._budgets["failed"] - self._counts["failed"],
            history=self._history,
            since=CLOCK.now() - self._seen_at,
        )

    def _carry_out(self, verdict: AttemptOutcome, mine: bool, worker_group: WorkerGroup) -> RunResult:
        names = ", ".join(verdict.nodes)
        if verdict.kind == "done":
            self.verdict = verdict
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        if verdict.kind in ("failed", "preempted"):
            return self._fail(verdict, mine)
        if verdict.kind == "ended":
            text = f"{names} received a signal to end{verdict.text}: all nodes end\n"
            return self._give_up(verdict, text)
        if verdict.kind == "left":
            self._rendezvous_handler.note_left(verdict.nodes, mine)
        return self._again(f"{names} {verdict.kind}: restarting\n", verdict.saving)

    def _fail(self, verdict: AttemptOutcome, mine: bool) -> RunResult:
        """Count the failure, and restart if restarts are left."""
        before, most = self._counts[verdict.kind], self._budgets[verdict.kind]
        text = "" if mine or verdict.kind == "preempted" else f"first failure: {verdict.text}\n"
        self._rendezvous_handler.count_one(verdict.kind, before)
        if verdict.kind == "failed":
            self._history = verdict.history
            text += verdict.history.tell(before + 1, most)
        elif before < most:
            text += f"preemption {before + 1} of {most}\n"
        if not may_restart(verdict, before, most):
            return self._give_up(verdict, text, mine)
        again = self._again(text, False, verdict.code, mine, verdict.history.resumes)
        for _ in range(verdict.history.wait):
            self.ask("wait", 1.0)
            self._rendezvous_handler.look()  # raises if the node that hosts the rendezvous has ended
        return again

    def _give_up(self, verdict: AttemptOutcome, text: str, first: bool = False) -> RunResult:
        self.ask("stop", [verdict.code, text, verdict.saving, first, False])
        self.verdict = verdict
        self.end_restarts()
        return RunResult(state=WorkerState.FAILED)

    def _again(
        self, text: str, saving: bool, code: int = 0, first: bool = False, resumes: bool = False
    ) -> RunResult:
        self.ask("stop", [code, text, saving, first, resumes])
        # Elastic restarts for this without a count, since each of its agents would count alone.
        self._rendezvous_handler.again = True
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        # All nodes have reported that they are done.
        pass


def _leaving(label: str, hosts: bool, code: int) -> AttemptOutcome:
    """Return the outcome that a node proposes after a signal to end."""
    if not hosts:
        return AttemptOutcome(kind="left", nodes=(label,), code=code, saving=True)
    text = " and hosts the rendezvous"
    return AttemptOutcome(kind="ended", nodes=(label,), text=text, code=code, saving=True)


def supervise(
    orders: Connection, *, processes: int, restarts: int, preemptions: int, nodes: Nodes, label: str
) -> None:
    """Order attempts until one succeeds, the restarts are used up or there are too few nodes."""
    try:
        with quiet():
            _supervise(orders, processes, restarts, preemptions, nodes, label)
    except LaunchError as error:
        _order(orders, "refuse", error.texts)
    except ClosedError as closed:
        text = f"{label} joined too late: the run has ended\n"
        _order(orders, "stop", [closed.verdict.code, text, False, False, False])
    except (RendezvousError, DistError) as error:
        why = str(error.__cause__ or error).splitlines()[0][:200]
        lost = LaunchError(
            given=f"{label}, one of --nodes {nodes.text}",
            found=f"the node at {nodes.address}, which hosts the rendezvous, can't be reached ({why})",
            fix="read that node's output; start the command again, on that node too",
        )
        _order(orders, "refuse", lost.texts)


def _supervise(
    orders: Connection, processes: int, restarts: int, preemptions: int, nodes: Nodes, label: str
) -> None:
    rendezvous = NodesRendezvous(nodes, processes=processes, label=label)
    agent = NodesAgent(
        rendezvous,
        orders,
        nodes,
        processes=processes,
        restarts=restarts,
        preemptions=preemptions,
        label=label,
    )
    try:
        agent.ask("tell", f"{label} waits at {nodes.address} for --nodes {nodes.text}\n")
        _run_to_end(agent, rendezvous)
    except ClosedError:
        rendezvous.depart()
        raise
    except NodeExit as leaving:
        with suppress(RendezvousError, DistError):
            rendezvous.leave(_leaving(label, rendezvous.hosts, leaving.code))
        # The launcher answers when the ranks have saved. The store stays until others have read it.
        _order(orders, "left", None)
        rendezvous.wait_for_others()


def _run_to_end(agent: NodesAgent, rendezvous: NodesRendezvous) -> None:
    try:
        agent.run()
        rendezvous.end(agent.verdict or AttemptOutcome(kind="ended", code=1))
    except (RendezvousError, DistError):
        if agent.verdict is None:
            raise
        # All is decided, and the node that hosts the store may have ended.


def _order(orders: Connection, order: str, value: object) -> None:
    with suppress(EOFError, OSError):
        Agent.order(orders, order, value)
