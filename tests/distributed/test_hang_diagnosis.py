from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest

from shoal.distributed.env_vars import REPORTS, set_variables
from shoal.distributed.failure import Failure, decode
from shoal.distributed.watchdog import abort, stacks
from shoal.distributed.watchdog.abort import EXIT_CODE
from shoal.distributed.watchdog.diagnosis import (
    BUSY_SECONDS,
    HangDiagnosis,
    RankReport,
    SilentRank,
    WaitLimits,
    decide,
    details,
    from_plain,
    table,
    to_plain,
)
from shoal.telemetry.flight_recorder import Collective, describe_tensors

GROUPS = {"0": [0, 1, 2], "pair": [0, 1]}
REDUCE = Collective(group="0", number=7, operation="all_reduce", tensors="float32[4]", done=False)
WAITS = RankReport(rank=0, host="a", place="train.py:9", function="f", waits=REDUCE, groups=GROUPS)
WAITS_2 = replace(WAITS, rank=2)
AWAY = RankReport(rank=1, host="b", place="train.py:5", function="g", groups=GROUPS)
COMPILES = replace(AWAY, busy="compiles")
SILENT = SilentRank(rank=1, host="b", pid=77, ended=False)
ENDED = replace(SILENT, ended=True)


def call(**changes: Any) -> Collective:
    return replace(REDUCE, **changes)


def judged(*found: RankReport | SilentRank) -> HangDiagnosis:
    verdict = decide(found, seconds=5.2)
    assert verdict is not None
    return verdict


def test_where_nobody_waits_any_more_nobody_is_to_blame() -> None:
    """What one waited for may come while all are asked."""
    for other in (AWAY, COMPILES, SILENT, ENDED):
        assert decide([replace(WAITS, waits=None), other], seconds=5.2) is None


def test_who_is_elsewhere_did_not_arrive() -> None:
    verdict = judged(WAITS, AWAY, WAITS_2)
    assert verdict == HangDiagnosis(
        rank=1,
        where="b, train.py:5",
        line="rank 1 of 3 on b did not arrive: it is at train.py:5 in g; "
        "ranks 0 and 2 have waited 5 s in all_reduce of float32[4] at train.py:9",
    )


def test_who_is_silent_or_gone_is_named() -> None:
    silent, ended = judged(WAITS, SILENT, WAITS_2), judged(WAITS, ENDED, WAITS_2)
    assert (silent.rank, silent.where) == (1, "b, pid 77")
    assert silent.line.startswith("rank 1 of 3 on b does not answer: process 77 is stopped")
    assert (ended.rank, ended.where) == (1, "b")
    assert ended.due(WaitLimits(step=600, prepare=3600), 600) < 0  # nothing is worth waiting for
    receives = replace(WAITS, waits=call(group="", operation="recv"))
    assert judged(receives, ENDED, WAITS_2).patience == 0.0  # it may wait for another one
    assert ended.line.startswith("rank 1 of 3 on b has ended or left its world (its ")


def test_a_machine_of_which_nothing_comes_back() -> None:
    cut = replace(SILENT, cut=True)
    verdict = judged(WAITS, cut, WAITS_2)
    assert (verdict.rank, verdict.where) == (1, "b")
    assert verdict.line == (
        "b can't be reached from a (rank 1 of 3): a link is cut, or the machine is down; "
        "ranks 0 and 2 have waited 5 s in all_reduce of float32[4] at train.py:9"
    )
    alone = judged(WAITS, cut, replace(cut, rank=2, host="c"))
    assert alone.line.startswith("a reaches no other machine: its own link is cut, or the links of all")
    assert "can't be reached" in table([WAITS, cut])


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([AWAY, replace(SILENT, rank=2)], 1),  # one that answers is known to be elsewhere
        ([replace(AWAY, rank=1), replace(ENDED, rank=2)], 2),  # who is gone will never come
        ([COMPILES, replace(AWAY, rank=2)], 2),
    ],
)
def test_the_likelier_cause_is_named(others: list[RankReport | SilentRank], named: int) -> None:
    verdict = judged(WAITS, *others)
    assert verdict.rank == named
    assert verdict.patience <= 0


def test_who_is_busy_or_prepares_is_waited_for() -> None:
    verdict = judged(WAITS, COMPILES, WAITS_2)
    assert verdict.patience == float("inf")
    assert "it is at train.py:5 in g, compiles; " in verdict.line
    assert verdict.due(WaitLimits(step=600, prepare=3600), 600) == 3600
    assert verdict.due(WaitLimits(step=5, prepare=5), 5) == BUSY_SECONDS
    limits = WaitLimits(step=5, prepare=100)
    prepares, steps = replace(AWAY, limit=100.0), replace(AWAY, rank=2, limit=5.0)
    assert judged(WAITS, prepares, WAITS_2).due(limits, 5) == 100
    assert judged(WAITS, replace(AWAY, limit=5.0), WAITS_2).due(limits, 5) == 5
    assert judged(WAITS, prepares, steps).rank == 2


def test_only_members_of_a_group_are_waited_for() -> None:
    waits = replace(WAITS, waits=call(group="pair"))
    assert judged(waits, AWAY, replace(AWAY, rank=2)).line.startswith("rank 1 of 3 on b did not arrive")
    assert "(and rank 2)" in judged(WAITS, AWAY, replace(AWAY, rank=2)).line
    # Rank 2 waits for rank 0, and rank 0 for rank 1.
    assert judged(waits, AWAY, WAITS_2).rank == 1


@pytest.mark.parametrize(
    ("other", "did"),
    [
        (call(operation="broadcast"), "broadcast of float32[4]"),
        (call(tensors="float32[5]"), "all_reduce of float32[5]"),
        (call(tensors="int32[4]"), "all_reduce of int32[4]"),
    ],
)
def test_what_does_not_match_is_the_cause(other: Collective, did: str) -> None:
    odd = replace(WAITS_2, place="train.py:11", waits=other)
    verdict = judged(WAITS, replace(WAITS, rank=1), odd)
    assert verdict.line == (
        f"rank 2 of 3 on a called {did} at train.py:11, where rank 0 called "
        "all_reduce of float32[4] at train.py:9: all ranks must call the same"
    )
    # It may have gone on, if its own call needed nobody.
    gone_on = replace(AWAY, rank=2, recent=(replace(other, done=True),))
    assert judged(WAITS, replace(WAITS, rank=1), gone_on).line.startswith(
        f"rank 2 of 3 on b called {did}, where"
    )


def test_all_may_wait_for_each_other_or_for_the_network() -> None:
    same = judged(WAITS, replace(WAITS, rank=1), WAITS_2)
    assert same.line.startswith("all 3 ranks have waited 5 s in all_reduce of float32[4] at train.py:9")
    assert same.patience > 0
    waits = replace(WAITS, waits=call(group="pair"))
    crossed = judged(waits, replace(WAITS, rank=1, waits=call(number=8)), WAITS_2)
    assert crossed.line.endswith("they wait for each other")
    # Sizes that may differ are no mismatch; what torch does not record may be for anyone.
    scatter = call(operation="scatter", tensors="")
    odd = replace(WAITS_2, waits=replace(scatter, tensors="x"))
    assert judged(replace(WAITS, waits=scatter), AWAY, odd).rank == 1
    receives = Collective(group="", number=0, operation="recv", tensors="", done=False)
    assert judged(replace(WAITS, waits=receives), AWAY, WAITS_2).rank == 1


def test_reports_and_tables() -> None:
    seen = replace(WAITS, recent=(REDUCE,), stacks="all of it\n")
    assert from_plain(json.loads(json.dumps(to_plain(seen)))) == seen
    text = table([WAITS, AWAY, SILENT, *(replace(WAITS, rank=rank) for rank in range(3, 99))])
    place = "  a  train.py:9 in f  waits in all_reduce of float32[4]"
    assert text.splitlines() == [
        f"rank 0 {place}",
        "rank 1   b  train.py:5 in g  does not wait",
        "rank 1   b  pid 77, no answer",
        *(f"rank {rank} {place}" for rank in range(3, 6)),
        "and 93 more in the same places",
    ]
    assert "rank 1 on b\n" in details([WAITS, SILENT])
    assert describe_tensors([[4, 2]], ["BFloat16"]) == "bfloat16[4, 2]"
    assert describe_tensors([[4], [1], []], ["float32"] * 3) == "float32[4] and 2 more"
    assert describe_tensors([], []) == ""


def test_where_the_main_thread_is() -> None:
    lines = stacks.thread_stack(threading.main_thread())
    assert stacks.own_line(lines).function == "test_where_the_main_thread_is"
    assert stacks.busy(lines) == stacks.communication(lines) == ""

    def line(file: str, function: str) -> stacks.StackLine:
        return stacks.StackLine(file=file, number=1, function=function)

    compiling = line("/x/torch/_dynamo/convert_frame.py", "_compile")
    debugging = line("/usr/lib/python3.11/bdb.py", "trace")
    receiving = line("/x/torch/distributed/distributed_c10d.py", "recv")
    assert stacks.busy([*lines, compiling]) == "compiles"
    assert stacks.busy([*lines, debugging, *lines]) == "is in a debugger"
    importing = line("<frozen importlib._bootstrap>", "_load")
    library = line("/x/site-packages/torch/__init__.py", "<module>")
    assert stacks.busy([*lines, importing, library]) == "imports modules"
    assert stacks.busy([importing, *lines]) == ""  # the user's own module: its lines are named
    assert stacks.communication([*lines, receiving]) == "recv"
    assert stacks.communication([receiving, *lines]) == ""


def test_a_report_reaches_the_launcher_as_a_failure() -> None:
    report = Failure(
        rank=1, code=EXIT_CODE, when=4.0, where="b, train.py:5", text="all of it", hung=True
    )
    ours, theirs = Pipe(duplex=False)
    with set_variables({REPORTS: f"{os.getpid()}:{theirs.fileno()}"}):
        assert abort.tell_launcher(report)
    assert decode(ours.recv_bytes()) == report
    # What a rank has started itself is not heard through the rank's pipe.
    with set_variables({REPORTS: f"{os.getpid() + 1}:{theirs.fileno()}"}):
        assert not abort.tell_launcher(report)
