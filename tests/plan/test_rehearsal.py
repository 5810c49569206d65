from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.cli import shoal
from shoal.tools.plan.training.rehearsal import (
    Fleet,
    FleetEvent,
    read_trace,
    rehearse,
    time_between_failures,
)
from shoal.tools.plan.training.whole_training import Training, simulate_training
from shoal.util.errors import ShoalError

FLEET = Fleet(nodes=2, least=2, restarts=3, wait=600, start=5.0, restart=20.0, save=1.0, interval=10.0)


def trace(tmp_path: Path, text: str, pool: int = 3) -> tuple[FleetEvent, ...]:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, pool)


@pytest.mark.parametrize("seed", range(2))
def test_with_spares_it_is_the_simulation_with_these_failures(seed: int) -> None:
    draw = random.Random(seed)
    gaps = [draw.expovariate(1 / 60) for _ in range(20)]
    times = [sum(gaps[: count + 1]) for count in range(20)]
    process = [FleetEvent(at=at, up=frozenset({0, 1, 2}), failed=0) for at in times]
    fleet = Fleet(nodes=2, least=2, restarts=99, wait=1, start=0, restart=20.0, save=1.0, interval=10.0)
    expected = simulate_training(Training(save=1.0, restart=20.0), 3.0, 100, 10.0, iter(gaps))
    found, _ = rehearse(fleet, process, 3, 3.0, 100)
    assert found.total == pytest.approx(expected.total)
    assert found.repeated == pytest.approx(expected.repeated)
    assert found.failures == expected.failures


def test_a_spare_node_replaces_one_that_dies(tmp_path: Path) -> None:
    # Steps of 2 s; a save of 1 s after each 5 steps: 11 s. Node 1 dies after one save and 4 s.
    found, used = rehearse(FLEET, trace(tmp_path, "at,node,back\n20,1,1000\n"), 3, 2.0, 10)
    assert (found.start, found.repeated, found.restarts, found.waiting) == (5, 4, 20, 0)
    assert (found.steps, found.saves, found.failures) == (20, 2, 1)
    assert used == 2 * found.total


def test_a_node_that_does_not_train_may_die(tmp_path: Path) -> None:
    assert not rehearse(FLEET, trace(tmp_path, "at,node,back\n20,2,1000\n"), 3, 2.0, 10)[0].failures


def test_without_a_spare_the_job_waits_until_the_node_is_back(tmp_path: Path) -> None:
    found, _ = rehearse(FLEET, trace(tmp_path, "at,node,back\n20,1,100\n", 2), 2, 2.0, 10)
    # The next step is at 20 + 100 + 5, of which the first 20 s count as the restart.
    assert (found.restarts, found.waiting) == (20, 85)


def test_an_elastic_training_goes_on_with_fewer_nodes_and_takes_them_back(tmp_path: Path) -> None:
    elastic = replace(FLEET, least=1)
    found, used = rehearse(elastic, trace(tmp_path, "at,node,back\n20,1,100\n", 2), 2, 2.0, 100)
    # From 40 to 120 s steps take 4 s, with a save after each 3: 6 saves and 18 steps in 78 s, and then
    # 2 s of a step, which is lost. The complete steps are kept when the node is back.
    assert (found.repeated, found.restarts, found.waiting) == (4 + 2, 40, 0)
    assert found.steps == 5 * 2 + 18 * 4 + (100 - 5 - 18) * 2
    assert used == 2 * found.total - 100
    assert found.failures == 1


def test_capacity_of_a_spot_market(tmp_path: Path) -> None:
    text = "at,nodes\n0,1\n60,2\n"
    assert rehearse(FLEET, trace(tmp_path, text, 2), 2, 2.0, 10)[0].waiting == 60
    assert rehearse(replace(FLEET, least=1), trace(tmp_path, text, 2), 2, 2.0, 10)[0].waiting == 0
    with pytest.raises(ShoalError, match="too few nodes are left"):
        rehearse(FLEET, trace(tmp_path, "at,nodes\n20,1\n", 2), 2, 2.0, 10)
    late = trace(tmp_path, "at,nodes\n20,0\n1220,1\n", 2)
    with pytest.raises(ShoalError, match="it waited 20 min"):
        rehearse(replace(FLEET, least=1), late, 2, 2.0, 100)


def test_a_trace_without_failures_is_a_training_without_them(tmp_path: Path) -> None:
    for text in ("at,node,back\n", "at,nodes\n", "at,nodes\n0,1\n", "at,nodes\n50,1\n"):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        given = f"steps=100,trace={path},save=2,restart=30,start=10"
        done = shoal("plan", "--model", "gpt2", "-n", "8", "--batch", "8", "--training", given)
        assert done.exit_code == 0, done.exception
        assert "start 10 s" in " ".join(done.stdout.split())


def test_failures_at_the_start_and_far_in_the_future(tmp_path: Path) -> None:
    assert time_between_failures(trace(tmp_path, "at,node,back\n0,0,5\n", 2), 2, 2) == math.inf
    (only,) = trace(tmp_path, "at,node,back\n5,0,1e308\n", 2)
    assert (only.at, only.up) == (5.0, frozenset({1}))


def test_a_node_is_back_after_the_last_of_its_outages(tmp_path: Path) -> None:
    events = trace(tmp_path, "at,node,back\n5,0,200\n50,0,10\n", 2)
    assert [(each.at, len(each.up)) for each in events] == [(5, 1), (50, 1), (60, 1), (205, 2)]


def test_restarts_are_limited_by_the_rules_of_the_launcher(tmp_path: Path) -> None:
    lines = "".join(f"{at},0,0\n" for at in (20, 60, 100))
    assert rehearse(FLEET, trace(tmp_path, "at,node,back\n" + lines), 3, 2.0, 100)[0].failures == 3
    with pytest.raises(ShoalError, match="no restart of 2 is left"):
        rehearse(replace(FLEET, restarts=2), trace(tmp_path, "at,node,back\n" + lines), 3, 2.0, 100)
    causes = "at,node,back,cause\n20,0,0,train.py:9\n60,0,0,train.py:9\n"
    with pytest.raises(ShoalError, match="repeats the failure before"):
        rehearse(FLEET, trace(tmp_path, causes), 3, 2.0, 100)


def test_wrong_traces(tmp_path: Path) -> None:
    for text, found in (
        ("", "the first line is ''"),
        ("time,node\n", "the first line is 'time,node'"),
        ("at,node,back\n1,2\n", "line 2"),
        ("at,node,back\nnan,1,2\n", "must be numbers, not negative"),
        ("at,node,back\n1,3,2\n", "node is 3, and there are 3 nodes"),
        ("at,nodes\n1,4\n", "nodes is 4"),
    ):
        with pytest.raises(ShoalError) as caught:
            trace(tmp_path, text)
        assert found in caught.value.given + caught.value.found, text


def test_the_command_rehearses_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,node,back\n5000,1,3000\n9000,2,0\n")
    given = f"steps=10000,trace={path},save=20,restart=300,start=100,price=2,spare=1,deadline=1"
    words = ["plan", "--model", "llama-7b", "-n", "64", "--training", given]
    done = shoal(*words)
    assert "The trace interrupts it 2 times" in " ".join(done.stdout.split())
    assert "0 % of the simulated" in " ".join(done.stdout.split())
    best = json.loads(shoal(*words, "--json").stdout)["best"]
    assert len({each["training"]["price"] for each in best}) > 1
    parts = best[0]["training"]["parts"]
    assert (parts["restarts"], parts["start"], parts["waiting"]) == (600, 100, 0)
