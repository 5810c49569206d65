"""The first sentence and the first finding name what costs most, in runs with planted causes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.synthetic_runs import Loading, Plant, simulate, write
from shoal.tools.report import BottleneckReport, Reader, find_bottleneck

ALL = (0, 1, 2)
PACE = {"start": {"workers": 2, "cores": 16}}


def judged(
    directory: Path, *plants: Plant, ranks: int = 3, steps: int = 500, start: Any = None, **how: Any
) -> BottleneckReport:
    reader = Reader(write(directory, simulate(ranks, steps, plants, **how), start=start))
    reader.poll()
    return find_bottleneck(reader.history)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Planted causes, and the words by which the costliest of them has to be named first."""

    plants: tuple[Plant, ...] = ()
    how: dict[str, Any] = field(default_factory=dict)
    sentence: str
    finding: str
    advice: str
    blamed: frozenset[tuple[int, str]] = frozenset()


def plant(part: str, seconds: float, *ranks: int, every: int = 1) -> Plant:
    return Plant(part=part, ranks=ranks or ALL, seconds=seconds, every=every)


SLOW_DEVICE = tuple(plant(part, 6e-3, 2) for part in ("forward", "backward", "update"))

CASES = {
    "data of one rank": Case(
        plants=(plant("wait", 12e-3, 1),),
        sentence="data (rank 1 on node0)",
        finding="Rank 1 on node0: data of a step",
        advice="storage",
        blamed=frozenset({(1, "wait")}),
    ),
    "data of all ranks": Case(
        plants=(plant("wait", 12e-3),),
        sentence="data",
        finding="Ranks wait for data",
        advice="num_workers=1)",
    ),
    "workers of one rank": Case(
        how={"loading": Loading(seconds=[20e-3, 90e-3, 20e-3]), **PACE},
        sentence="data (rank 1 on node0)",
        finding="Rank 1 on node0: data of a step",
        advice="storage",
        blamed=frozenset({(1, "wait")}),
    ),
    "workers of all ranks": Case(
        how={"loading": Loading(seconds=[90e-3, 92e-3, 91e-3]), **PACE},
        sentence="data",
        finding="Ranks wait for data",
        advice="num_workers=6)",
    ),
    "workers of all ranks that outnumber the cores": Case(
        how={
            "loading": Loading(seconds=[90e-3, 92e-3, 91e-3]),
            "start": {"workers": 2, "cores": 1},
        },
        sentence="data",
        finding="Ranks wait for data",
        advice="if workers mostly wait, since a rank has 1 core;",
    ),
    "one slow device": Case(
        plants=SLOW_DEVICE,
        how={"network": 9e-3},
        sentence="a slow forward, backward and optimizer (rank 2 on node1)",
        finding="Rank 2 on node1: ",
        advice="slow or shared device",
        blamed=frozenset((2, part) for part in ("forward", "backward", "update")),
    ),
    "a narrow link": Case(
        how={"network": 25e-3},
        sentence="exposed communication",
        finding="All ranks wait for each other's data",
        advice='compression="auto") or shoal.DiLoCo(sync_every=500)',
    ),
    "saves": Case(
        plants=(plant("checkpoint", 0.4, every=20),),
        how={"steps": 1000},
        sentence="checkpoints",
        finding="Checkpoints block training",
        advice="run.tick(every=",
    ),
    "saves of one rank": Case(
        plants=(plant("checkpoint", 0.4, 0, every=20),),
        sentence="checkpoints (rank 0 on node0)",
        finding="Rank 0 on node0: a save",
        advice="run.tick(every=",
        blamed=frozenset({(0, "checkpoint")}),
    ),
    "stalls of all ranks": Case(
        plants=(plant("forward", 0.3, every=50),),
        sentence="stalls (of all ranks, forward, every 50 steps)",
        finding="All ranks stall together every 50 steps",
        advice="garbage collection",
    ),
    "lengths that are uneven": Case(
        how={"uneven": 0.6},
        sentence="ranks waiting for each other",
        finding="Ranks wait for each other in turn",
        advice="shoal.TokenBudget(",
    ),
    "few steps of uneven lengths": Case(
        how={"uneven": 0.6, "steps": 40},
        sentence="ranks waiting for each other",
        finding="Ranks wait for each other in turn",
        advice="shoal.TokenBudget(",
    ),
    "the script": Case(
        plants=(plant("other", 10e-3),),
        sentence="the script's own time",
        finding="The script's own code",
        advice="profile=",
    ),
    "a slow rank beside a smaller loss of the network": Case(
        plants=(plant("backward", 15e-3, 2),),
        how={"network": 5e-3},
        sentence="a slow backward (rank 2 on node1)",
        finding="Rank 2 on node1: backward",
        advice="slow or shared device",
        blamed=frozenset({(2, "backward")}),
    ),
    "the network beside a rank that is a little slower": Case(
        plants=(plant("backward", 3e-3, 2),),
        how={"network": 20e-3},
        sentence="exposed communication",
        finding="All ranks wait for each other's data",
        advice="compress",
        blamed=frozenset({(2, "backward")}),
    ),
    "stalls beside a slower rank and saves": Case(
        plants=(
            plant("update", 0.8, every=50),
            plant("wait", 3e-3, 1),
            plant("checkpoint", 0.1, every=100),
        ),
        sentence="stalls (of all ranks, optimizer, every 50 steps)",
        finding="All ranks stall together every 50 steps",
        advice="garbage collection",
        blamed=frozenset({(1, "wait")}),
    ),
    "the costlier of two slow ranks": Case(
        plants=(plant("forward", 12e-3, 2), plant("wait", 4e-3, 1)),
        sentence="a slow forward (rank 2 on node1)",
        finding="Rank 2 on node1: forward",
        advice="slow or shared device",
        blamed=frozenset({(2, "forward"), (1, "wait")}),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_costliest_cause_is_named_first(tmp_path: Path, case: Case) -> None:
    found = judged(tmp_path, *case.plants, seed=1, **case.how)
    said = (found.sentence, [(each.cost, each.text) for each in found.findings])
    first = found.sentence.partition(": ")[2].partition(" % ")[2]
    assert first.startswith((f"{case.sentence},", f"{case.sentence}.", f"{case.sentence};")), said
    assert found.findings[0].text.startswith(case.finding), said
    assert case.advice in found.findings[0].advice, found.findings[0].advice
    assert {(each.rank, each.part) for each in found.stragglers} == case.blamed, said
    costs = [each.cost for each in found.findings]
    assert costs == sorted(costs, reverse=True)


def test_saves_of_a_short_run_need_no_advice(tmp_path: Path) -> None:
    found = judged(tmp_path, plant("checkpoint", 0.1, every=20))
    assert found.shares["checkpoint"] > 0.1
    assert found.findings == []


def test_stalls_are_no_computing_and_have_a_period(tmp_path: Path) -> None:
    """A garbage collection of 300 ms every 50th step of 18 ms is a quarter of the time."""
    without = judged(tmp_path / "without", steps=1000)
    found = judged(tmp_path / "with", plant("backward", 0.3, every=50), steps=1000)
    lost = 0.3 / 50 / (0.3 / 50 + 17.8e-3)
    assert found.shares["stalls"] == pytest.approx(lost, rel=0.1)
    assert without.efficient is not None
    assert found.efficient == pytest.approx(without.efficient * (1 - lost), rel=0.03)
    assert "stalls" not in without.shares
    [stalls] = found.judged[0].stalls
    assert (stalls.part, stalls.period, stalls.count) == ("backward", 50, 20)
    assert stalls.excess == pytest.approx(0.3, rel=0.05)
    assert f"--trace {stalls.newest}:{stalls.newest}" in found.findings[0].advice


def test_a_stall_that_comes_once_has_no_period(tmp_path: Path) -> None:
    once = Plant(part="forward", ranks=ALL, seconds=5.0, since=300, until=300)
    found = judged(tmp_path, once)
    assert "stalls (of all ranks, forward, at step 300)" in found.sentence


def test_a_process_alone_stalls_without_company(tmp_path: Path) -> None:
    found = judged(tmp_path, plant("forward", 0.3, 0, every=50), ranks=1)
    assert "stalls (forward, every 50 steps)" in found.sentence
    assert found.findings[0].text.startswith("Training stalls every 50 steps")


def test_what_comes_back_in_another_part_is_told_there(tmp_path: Path) -> None:
    found = judged(tmp_path, plant("other", 0.3, every=50))
    assert found.findings[0].text.startswith("The script's own code")
    assert "every 50 steps: 300 ms" in found.findings[0].text


def test_a_longer_batch_is_no_stall(tmp_path: Path) -> None:
    """Every 20th batch has eight times as many tokens, and takes eight times as long."""
    parts = simulate(3, 500, noise=0.02)
    longer = np.where(np.arange(1, 501) % 20 == 0, 8, 1)
    for part in ("forward", "backward"):
        parts["wall"] += parts[part] * (longer - 1)
        parts[part] *= longer
    directory = write(tmp_path, parts, counted=64 * longer)
    reader = Reader(directory)
    reader.poll()
    assert "stalls" not in find_bottleneck(reader.history).shares


def test_a_block_without_the_time_of_loading_is_not_what_a_run_writes(tmp_path: Path) -> None:
    parts = simulate(3, 500, loading=Loading(seconds=[90e-3, 99e-3, 91e-3]))
    bare = {part: values for part, values in parts.items() if part != "load"}
    reader = Reader(write(tmp_path, bare, start={"workers": 2}))
    reader.poll()
    assert reader.history.skipped == 3
