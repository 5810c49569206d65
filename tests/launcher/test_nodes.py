"""Several nodes, without any: what is typed, what two launchers must have in common, who decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers.ranks import free_port
from shoal.distributed.cluster_env import Placement, detect
from shoal.distributed.failure import Failure
from shoal.launcher import multi_node_rendezvous
from shoal.launcher.attempt_outcome import SETTLE, AttemptOutcome, NodeReport, decide_outcome
from shoal.launcher.failure_history import PASSES_WITHIN, FailureHistory
from shoal.launcher.nodes import Nodes, choose_nodes, differences, listen, parse_address, parse_numbers
from shoal.util.errors import LaunchError

ALONE = detect({}, 4, list)
SRUN = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def chosen(nodes: str, rendezvous: str | None, placement: Placement = ALONE) -> Nodes | None:
    return choose_nodes(nodes, rendezvous, placement, {"--nodes": nodes})


def test_numbers_and_addresses() -> None:
    for text, numbers in (("2", (2, 2)), ("2:4", (2, 4)), (" 1:3 ", (1, 3))):
        assert parse_numbers(text) == numbers
    for text in ("4:2", "0", "0:2", "-1", "two", "", "2:", ":2", "1:2:3", "2.5"):
        with pytest.raises(LaunchError, match=f"--nodes {text}"):
            parse_numbers(text)
    for text, host, port in (
        ("n1:29400", "n1", 29400),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("[fe80::1]:80", "fe80::1", 80),
    ):
        assert parse_address(text) == (host, port)
        assert Nodes(least=2, most=2, host=host, port=port).address == text
    for text in ("n1", "n1:", ":29400", "n1:0", "n1:65536", "fe80::1:80", "a b:3", ""):
        with pytest.raises(LaunchError, match="not a host and a port"):
            parse_address(text)


def test_several_nodes_need_an_address_and_possible_times() -> None:
    assert chosen("1", None) is None
    with pytest.raises(LaunchError, match="no rendezvous address"):
        chosen("2", None)
    for wait, silence in ((0.0, 5.0), (float("nan"), 5.0), (60.0, 0.5), (1e9, 5.0)):
        with pytest.raises(LaunchError, match="and at most 86400"):
            choose_nodes("2", "n1:500", ALONE, {}, wait=wait, silence=silence)


def test_the_scheduler_names_the_address_and_the_job() -> None:
    placement = detect(SRUN, 4, list)
    nodes = chosen("2", None, placement)
    assert nodes is not None
    assert (nodes.host, nodes.port) == ("n1", placement.port)
    assert nodes.job == {"--nodes": "2", "job": "slurm--77.0-0"}
    given = chosen("2", "n2:500", placement)
    assert given == replace(nodes, host="n2", port=500)


def test_what_two_launchers_differ_in_is_named() -> None:
    ours = {"--nodes": "2:4", "command": "a.py"}
    assert differences(ours, dict(ours)) == ""
    assert differences(ours, {**ours, "--nodes": "2"}) == "--nodes 2 there, 2:4 here"
    assert differences(ours, {**ours, "job": "x"}) == "job x there, not given here"


def test_why_a_node_can_not_listen() -> None:
    server = listen("127.0.0.1", 0)
    assert not isinstance(server, str)
    with server:
        assert server.getsockname()[0] == "127.0.0.1"
        port = server.getsockname()[1]
        assert listen("127.0.0.1", port) == f"port {port}: Address already in use"
    assert "192.0.2.1 is not an address of" in str(listen("192.0.2.1", 5000))  # RFC 5737's
    with pytest.raises(LaunchError, match="can't be resolved"):
        listen("no-such-host.invalid", 5000)


SEEN = NodeReport(
    me="a",
    nodes=("a", "b"),
    present=("a", "b"),
    waiting=(),
    labels={"a": "n1", "b": "n2", "c": "n3"},
)
KILLED = Failure(rank=3, code=137, when=0.0, where="n1, pid 7", signal=9)
RAISED = Failure(rank=3, code=1, when=0.0, where="n1, f.py:3", text="ValueError: boom")
BY_PEER = replace(RAISED, by_peer=True)
PREEMPTED = replace(RAISED, code=75, text="")
ABORTED = replace(KILLED, signal=6, code=134)


def test_how_an_attempt_ends() -> None:
    rows: tuple[tuple[dict[str, Any], str | None, tuple[str, ...]], ...] = (
        ({}, None, ()),
        ({"failure": KILLED}, "failed", ("n1",)),
        ({"failure": RAISED}, None, ()),
        ({"failure": RAISED, "since": SETTLE}, "failed", ("n1",)),
        ({"failure": BY_PEER, "since": 6.9}, None, ()),
        ({"failure": BY_PEER, "since": 7.0}, "failed", ("n1",)),
        ({"failure": ABORTED, "since": 6.9}, None, ()),
        ({"failure": PREEMPTED, "since": SETTLE}, "preempted", ("n1",)),
        # Its launcher passed on that the end comes: there is no sense in starting again.
        ({"failure": PREEMPTED, "since": SETTLE, "told": True}, "ended", ("n1",)),
        ({"present": ("a",)}, "left", ("n2",)),
        # What reads as a peer's death was the death of a node; a kill here is known to be one.
        ({"present": ("a",), "failure": BY_PEER, "since": 7.0}, "left", ("n2",)),
        ({"present": ("a",), "failure": KILLED}, "failed", ("n1",)),
        ({"waiting": ("c",)}, "joined", ("n3",)),
        # Who has done its part is not started again for a newcomer.
        ({"waiting": ("c",), "done": 1}, None, ()),
        ({"waiting": ("c",), "done": 2}, "done", ()),
        ({"present": ("a",), "waiting": ("c",)}, "left", ("n2",)),
        # A node that the others have given up sees that too.
        ({"present": ("b",)}, "left", ("n1",)),
    )
    for change, kind, nodes in rows:
        verdict = decide_outcome(replace(SEEN, **change), patience=7.0)
        assert (verdict and verdict.kind, verdict.nodes if verdict else ()) == (kind, nodes), change
        if verdict is not None:
            assert AttemptOutcome.parse(verdict.render()) == verdict, change
            # Ranks may save only where all are there.
            assert (kind, verdict.saving) != ("joined", False)
            assert (kind, verdict.saving) != ("left", True)


def test_a_verdict_tells_rank_place_and_reason() -> None:
    verdict = decide_outcome(replace(SEEN, failure=KILLED), patience=7.0)
    assert verdict is not None
    assert verdict.text.startswith("rank 3 on n1, pid 7: killed by SIGKILL")
    assert verdict.code == 137


def test_a_failure_is_repeated_at_the_same_rank_line_and_step() -> None:
    failure, place = replace(RAISED, step=7), "rank 3, f.py:3, after step 7"
    seen = replace(SEEN, failure=failure, since=SETTLE)
    for before, repeated in (("", False), (place, True), (f"{place}0", False)):
        history = FailureHistory(signature=before)
        verdict = decide_outcome(replace(seen, history=history), patience=7.0)
        assert verdict is not None
        assert (verdict.history.signature, bool(verdict.history.end)) == (place, repeated)
        assert AttemptOutcome.parse(verdict.render()) == verdict
    unknown = (RAISED, replace(failure, where="n1"), replace(failure, by_peer=True), KILLED)
    passing = replace(failure, passing="EIO")
    assert [each.signature for each in (*unknown, passing)] == [""] * 5


def waits(restarts: int, steps: Sequence[int | None], ran: float = 9.0) -> list[int]:
    """Return the waits before the restarts after faults that may pass, at these steps."""
    history, found = FailureHistory(), []
    for step in steps:
        failure = replace(RAISED, step=step, passing="EIO")
        history = history.after(failure, restarts=restarts, ran=ran)
        if history.end or not restarts:
            break
        found.append(history.wait)
        restarts -= 1
    return found


def test_a_fault_that_may_pass_is_waited_for_until_a_total() -> None:
    for restarts in (1, 2, 3, 10, 11, 1000):
        for step in (7, None):
            found = waits(restarts, [step] * 2000)
            assert sum(found) == PASSES_WITHIN
            assert found == sorted(found) or found[:-1] == sorted(found[:-1])
            assert len(found) == min(restarts, 10)
    assert waits(10, [7] * 20) == [1, 2, 4, 8, 16, 32, 60, 60, 60, 57]
    assert waits(2, [7, 7, 7]) == [100, 200]
    assert waits(0, [7]) == []
    # A larger step is progress; a smaller one, in another place, is not.
    assert waits(20, [7, 7, 8, 8, 5, 9]) == [1, 2, 1, 2, 4, 1]
    assert waits(20, [None] * 3, ran=PASSES_WITHIN + 1) == [1, 1, 1]
    once = FailureHistory().after(replace(RAISED, step=7, passing="EIO"), restarts=9, ran=1.0)
    killed = once.after(KILLED, restarts=8, ran=1.0)
    assert (killed.wait, killed.end, killed.waited) == (0, "", 1)
    raised = once.after(replace(RAISED, step=7), restarts=8, ran=1.0)
    assert not raised.end
    assert raised.after(replace(RAISED, step=7), restarts=7, ran=1.0).end.startswith("the same failure")


@pytest.mark.full
def test_a_rendezvous_at_which_nothing_listens_is_not_said_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after its name got another address."""
    monkeypatch.setattr(multi_node_rendezvous, "listen", lambda host, *_, **__: f"{host} is elsewhere")
    nodes = Nodes(least=2, most=2, host="127.0.0.1", port=free_port(), wait=1.0)
    with pytest.raises(LaunchError, match=r"Connection refused\); here, 127.0.0.1 is elsewhere"):
        multi_node_rendezvous.NodesRendezvous(nodes, processes=1, label="here")
