"""The outcome of an attempt of several nodes: decided once, by the first node that knows, for all."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from shoal.distributed.failure import Failure, preempted, reason
from shoal.launcher.failure_history import FailureHistory

SETTLE = 0.3
"""Seconds for which a rank's own error waits for a better explanation from another node."""

Kind = Literal["failed", "preempted", "left", "joined", "done", "ended"]


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """The reason why an attempt is over, for all of its nodes.

    failed: a rank of `nodes` failed; it counts as a restart. preempted: ranks left to be restarted,
    which has its own count. left, joined: `nodes` did, and all restart without or with them. done: all
    ranks ended well. ended: `nodes`, without which there is no rendezvous, received a signal to end.
    `code` is the exit code, if needed. `history` has the failures of the run up to this one. `saving`
    is True if all ranks are still present, and can save.
    """

    kind: Kind
    nodes: tuple[str, ...] = ()
    text: str = ""
    code: int = 0
    saving: bool = False
    history: FailureHistory = field(default_factory=FailureHistory)

    def render(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | bytes) -> AttemptOutcome:
        """Return the outcome that `render` wrote."""
        values = json.loads(text)
        history = FailureHistory(**values["history"])
        return AttemptOutcome(**{**values, "nodes": tuple(values["nodes"]), "history": history})


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """An attempt as one node sees it.

    `nodes` are those of the attempt, `present` those alive, by identity; `labels` are their names in
    messages. `failure` is this node's own, if any, seen `since` seconds ago in an attempt that has run
    for `ran` seconds; `history` has those before it. `restarts` may follow. `told` is True if its
    launcher had forwarded a signal to end to its ranks. `done` counts the nodes whose ranks have all
    ended well.
    """

    me: str
    nodes: Sequence[str]
    present: Collection[str]
    waiting: Collection[str]
    labels: dict[str, str]
    done: int = 0
    failure: Failure | None = None
    since: float = 0.0
    told: bool = False
    ran: float = 0.0
    restarts: int = 0
    history: FailureHistory = field(default_factory=FailureHistory)


def decide_outcome(seen: NodeReport, *, patience: float) -> AttemptOutcome | None:
    """Return the outcome of the attempt as one node sees it; None while it runs.

    A rank that was killed here needs no further explanation. The error of a rank is held back for a
    moment, and one that looks like the death of a peer for `patience` seconds, in which the death of a
    node is noticed.
    """
    failure = seen.failure
    if failure is not None and failure.killed:
        return _failed(seen, failure)
    lost = [node for node in seen.nodes if node not in seen.present]
    if lost:
        return AttemptOutcome(kind="left", nodes=tuple(seen.labels.get(node, node) for node in lost))
    if failure is not None:
        settle = patience if failure.doubtful else SETTLE
        return _failed(seen, failure) if seen.since >= settle else None
    if seen.done == len(seen.nodes):
        return AttemptOutcome(kind="done")
    if seen.waiting and not seen.done:
        joined = tuple(seen.labels.get(node, node) for node in seen.waiting)
        return AttemptOutcome(kind="joined", nodes=joined, saving=True)
    return None


def may_restart(outcome: AttemptOutcome, before: int, most: int) -> bool:
    """Return whether an attempt follows a failure, after `before` of at most `most` restarts."""
    return before < most and not outcome.history.end


def _failed(seen: NodeReport, failure: Failure) -> AttemptOutcome:
    me = (seen.labels.get(seen.me, seen.me),)
    if preempted([failure]) and seen.told:
        return AttemptOutcome(kind="ended", nodes=me, code=failure.code, saving=True)
    return AttemptOutcome(
        kind="preempted" if preempted([failure]) else "failed",
        nodes=me,
        text=f"rank {failure.rank} on {failure.where}: {reason(failure)}",
        code=failure.code,
        history=seen.history.after(failure, restarts=seen.restarts, ran=seen.ran),
    )
