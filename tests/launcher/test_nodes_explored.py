"""Elastic attempts of several nodes and their restarts, in every order of failures and deaths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.exploration.shared_store import SharedClock, SharedStore
from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.failure import Failure
from shoal.launcher import attempt_outcome, multi_node_agent, multi_node_rendezvous
from shoal.launcher.attempt_outcome import AttemptOutcome
from shoal.launcher.failure_history import FailureHistory

SILENCE = 5.0
ROUNDS = 10
"""Looks of one node at its ranks, after which it waits forever."""

Script = Mapping[tuple[int, int], str]
"""For (attempt, node): "failed", "passing" or "preempted" for a rank of it; other ranks end well."""


class Members:
    """torch's rendezvous: a round begins with all living nodes, once the nodes of the last one left.

    A dead node is present until its silence has been noticed.
    """

    def __init__(self, world: Execution, name: str, state: Any) -> None:
        self._world, self.me, self._state = world, name, state

    @property
    def round(self) -> int:
        return int(self._state.round)

    def next_rendezvous(self) -> RendezvousInfo:
        world, state = self._world, self._state

        def join() -> int:
            state.here.discard(self.me)
            state.waiting.add(self.me)
            return int(state.round)

        before = world.operate("join", join)
        world.block("rendezvous", lambda: state.round > before or self._complete())
        if state.round == before:
            state.round += 1
            state.here, state.waiting = set(state.waiting), set()
            state.nodes = sorted(state.here)
        world.observe((state.round, tuple(state.nodes)))
        store: Any = SharedStore(world, f"round {state.round}/")
        nowhere: Any = None
        return RendezvousInfo(store, state.nodes.index(self.me), len(state.nodes), nowhere)

    def _complete(self) -> bool:
        gone = self._state.noticed
        here, waiting = self._state.here - gone, self._state.waiting - gone
        alive = {f"node {node}" for node in range(self._state.size)} - gone - self._state.left
        return not here and waiting == alive

    def look(self) -> tuple[list[str], list[str]]:
        def seen() -> tuple[tuple[str, ...], tuple[str, ...]]:
            gone = self._state.noticed
            return tuple(sorted(self._state.here - gone)), tuple(sorted(self._state.waiting - gone))

        here, waiting = self._world.operate("look", seen)
        return list(here), list(waiting)


def training(
    old: str = "",
    new: str = "",
    module: Any = multi_node_agent,
    *,
    size: int = 2,
    script: Script | None = None,
    restarts: int = 1,
    preemptions: int = 1,
    kills: int = 0,
) -> Protocol:
    """Nodes that run one rank each until all ranks have ended well, or the restarts are used up."""
    modules: dict[Any, Any] = {
        each: load_variant(each, old if each is module else "", new if each is module else "")
        for each in (attempt_outcome, multi_node_rendezvous, multi_node_agent)
    }
    agents, meeting = modules[multi_node_agent], modules[multi_node_rendezvous]
    agents.decide_outcome = modules[attempt_outcome].decide_outcome

    def begin(world: Execution) -> Callable[[bool], None]:
        agents.CLOCK = meeting.CLOCK = SharedClock(world)
        world.mortal |= set(range(1, size))  # node 0 has the store
        budgets = {"failed": restarts, "preempted": preemptions}
        here = RunOfNodes(world, agents, meeting, size, script or {}, budgets)
        for node in range(size):
            world.spawn(f"node {node}", node, partial(here.run, node))
        world.spawn("silence", size, partial(here.notice, kills))
        return partial(check_nodes, world, here.carried, here.problems, restarts, script or {})

    return Protocol(begin=begin, kills=kills, endless=("silence",))


class RunOfNodes:
    """The nodes of one execution, and how each ended each attempt."""

    def __init__(
        self,
        world: Execution,
        agents: Any,
        meeting: Any,
        size: int,
        script: Script,
        budgets: dict[str, int],
    ) -> None:
        self.world, self.agents, self.meeting = world, agents, meeting
        self.script, self.budgets = script, budgets
        self.state: Any = SimpleNamespace(round=0, here=set(), waiting=set(), nodes=[], size=size)
        self.state.left, self.state.noticed = set(), frozenset()
        world.outside = self.shown
        self.carried: dict[tuple[int, int], AttemptOutcome] = {}
        self.problems: list[str] = []

    def shown(self) -> tuple[str, ...]:
        state = self.state
        return tuple(
            str(sorted(each)) for each in (state.here, state.waiting, state.left, state.noticed)
        )

    def make(self, node: int) -> tuple[Any, Any]:
        """The agent of a node and its rendezvous, without their processes and sockets."""
        handler: Any = object.__new__(self.meeting.NodesRendezvous)
        handler._members = Members(self.world, f"node {node}", self.state)
        handler._store = SharedStore(self.world)
        handler._nodes = SimpleNamespace(index=-node)  # against the order of torch's ranks
        handler._processes, handler._left, handler.again = 1, [], False
        handler._open_ranks_store = lambda: 1
        handler._address, handler.attempt = "host", None
        handler.labels = lambda nodes: {name: name for name in nodes}
        agent: Any = object.__new__(self.agents.NodesAgent)
        agent._rendezvous_handler, agent._label = handler, f"node {node}"
        agent._nodes = SimpleNamespace(silence=SILENCE)
        agent._budgets, agent._history, agent.verdict = self.budgets, FailureHistory(), None
        agent.end_restarts = lambda: None
        agent.ask = partial(self.answer, agent, node)
        carry_out = agent._carry_out

        def carried_out(verdict: AttemptOutcome, mine: bool, group: Any) -> Any:
            self.carried[agent._attempt.number, node] = verdict
            # A long wait for a fault to pass would only repeat one look at the others.
            history = replace(verdict.history, wait=min(verdict.history.wait, 1))
            return carry_out(replace(verdict, history=history), mine, group)

        agent._carry_out = carried_out
        return agent, handler

    def run(self, node: int) -> None:
        """All attempts of a node."""
        agent, handler = self.make(node)
        while agent.verdict is None:
            handler.next_rendezvous()
            agent._begin()
            for _ in range(ROUNDS):
                agent._monitor_workers(SimpleNamespace(workers=[]))
                if handler.again or agent.verdict is not None:
                    break
            else:
                number = handler.attempt.number
                self.problems.append(f"node {node} waits forever in attempt {number}")
                return
        self.state.left.add(f"node {node}")

    def answer(self, agent: Any, node: int, order: str, value: Any) -> Any:
        """What a launcher answers: its ranks end at any time, or fail because a peer has."""
        if order == "pause":
            self.world.sleep(1.0)
        if order != "look":
            return None
        number, nodes = agent._attempt.number, agent._attempt.nodes
        others = [int(name.split()[1]) for name in nodes if name != f"node {node}"]
        kind = self.script.get((number, node), "")
        failing = [o for o in others if (number, o) in self.script or o in self.world.dead]
        if not kind and failing:
            kind = "by peer"
        if not kind:
            return {"failure": None, "told": False}
        code = REQUEUE if kind == "preempted" else 1
        passing = "EIO" if kind == "passing" else ""
        failure = Failure(
            rank=node, code=code, when=0.0, where="host", by_peer=kind == "by peer", passing=passing
        )
        return {"failure": vars(failure), "told": False}

    def notice(self, kills: int) -> None:
        """Notice the silence of dead nodes, at any time."""
        for _ in range(kills):
            self.world.block("silence", lambda: len(self.world.dead) > len(self.state.noticed))
            self.world.operate("notice", self.see_silence)

    def see_silence(self) -> None:
        self.state.noticed = frozenset(f"node {node}" for node in self.world.dead)


def check_nodes(
    world: Execution,
    carried: dict[tuple[int, int], AttemptOutcome],
    problems: list[str],
    restarts: int,
    outcomes: Script,
    at_end: bool,
) -> None:
    if problems:
        raise BrokenPropertyError(problems[0])
    for number in {number for number, _ in carried}:
        verdicts = {each for (n, _), each in carried.items() if n == number}
        if len(verdicts) > 1:
            raise BrokenPropertyError(f"attempt {number} ended in different ways: {verdicts}")
        verdict = verdicts.pop()
        if verdict.kind in ("failed", "preempted"):
            # An error of a peer counts if it waited in vain for the node that has the reason.
            did = outcomes.get((number, int(verdict.nodes[0].removeprefix("node "))), "by peer")
            if (did == "preempted") != (verdict.kind == "preempted"):
                raise BrokenPropertyError(f"attempt {number} ended with {verdict.kind}, not {did}")
    failures = len({number for (number, _), each in carried.items() if each.kind == "failed"})
    for kind in ("failed", "preempted"):
        counted = int(str(world.shared.get(f"shoal/count/{kind}") or 0))
        ended = len({n for (n, _), each in carried.items() if each.kind == kind})
        if counted > ended:
            raise BrokenPropertyError(f"{counted} attempts count as {kind}, of {ended}")
    if at_end and carried:
        last = max(number for number, _ in carried)
        kind = next(each.kind for (n, _), each in carried.items() if n == last)
        wanted = "failed" if failures > restarts else "done"
        if kind != wanted:
            raise BrokenPropertyError(f"the run ended with {kind} after {last} attempts, not {wanted}")


FAILED, PREEMPTED = {(1, 0): "failed"}, {(1, 1): "preempted"}
PASSING = {(1, 0): "passing", (1, 1): "failed", (2, 1): "passing"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        ({}, 500),
        pytest.param({"kills": 1}, 5_000, marks=pytest.mark.long),
        pytest.param({"script": FAILED}, 6_000, marks=pytest.mark.long),
        pytest.param({"script": {**FAILED, (1, 1): "failed"}}, 6_000, marks=pytest.mark.long),
        pytest.param({"script": {**PREEMPTED, (2, 0): "failed"}}, 6_000, marks=pytest.mark.long),
        pytest.param({"script": FAILED, "restarts": 0}, 1_000, marks=pytest.mark.long),
        pytest.param({"script": PASSING, "restarts": 2}, 6_000, marks=pytest.mark.long),
        pytest.param({"size": 3, "script": FAILED}, 6_000, marks=pytest.mark.long),
        pytest.param({"size": 3, "kills": 1}, 6_000, marks=pytest.mark.long),
    ],
)
def test_all_nodes_end_an_attempt_the_same_way(bounds: dict[str, Any], least: int) -> None:
    found = explore(training(**bounds), states=30_000)
    print(found)
    assert not found.failure, found
    assert found.states >= least


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "old", "new", "bounds"),
    [
        # The last node to propose an outcome decides, not the first.
        (
            multi_node_rendezvous,
            'self.store.compare_set(_VERDICT, "", verdict.render())',
            "(self.store.set(_VERDICT, verdict.render()), self.store.get(_VERDICT))[1]",
            {"script": FAILED},
        ),
        # Each node counts a failure.
        (
            multi_node_rendezvous,
            'self._store.compare_set(f"shoal/count/{kind}", str(before), str(before + 1))',
            'self._store.add(f"shoal/count/{kind}", 1)',
            {"script": FAILED},
        ),
        # The count is read again after another node has counted.
        (
            multi_node_agent,
            "before, most = self._counts[verdict.kind], self._budgets[verdict.kind]",
            "before, most = self._rendezvous_handler.count(verdict.kind), self._budgets[verdict.kind]",
            {"script": FAILED},
        ),
        # A node that has died is waited for.
        pytest.param(
            attempt_outcome,
            "lost = [node for node in seen.nodes if node not in seen.present]",
            "lost: list[str] = []",
            {"kills": 1},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_defect_is_found(module: Any, old: str, new: str, bounds: dict[str, Any]) -> None:
    found = explore(training(old, new, module, **bounds), states=100_000)
    print(found)
    assert found.failure
