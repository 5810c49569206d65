"""A run with a plan: what it warns of, prints and records, and the plans that it refuses."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers import cli
from helpers.ranks import Ranks
from helpers.small_training import squared_error, step_of
from shoal.telemetry.events import Events, path_of, read_events
from shoal.telemetry.step_timer import BACKWARD, COMMUNICATION, FORWARD, PARTS, UPDATE, WAIT
from shoal.tools.report import Reader, find_bottleneck
from shoal.training.predicted_steps import WARM_UP, WINDOW, PlannedSteps

MODEL = "hidden=64,layers=2,heads=2,vocab=100,seq=32"
SECOND = 10**9


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """A plan for one rank and a batch of four samples, as the command prints it."""
    done = cli.shoal("plan", "--model", MODEL, "--machine", "cpu", "-n", "1", "--batch", "4", "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write(path: Path, plan: dict[str, Any], **changes: Any) -> Path:
    best = [plan["best"][0] | changes, *plan["best"][1:]]
    path.write_text(json.dumps(plan | {"best": best}))
    return path


def train(world: shoal.World, directory: Path, plan: Any, steps: int = 0, batch_size: Any = 4) -> None:
    step = step_of(world, nn.Linear(4, 2), squared_error, lr=0.01)
    loader = shoal.Loader((torch.ones(8, 4), torch.ones(8, 2)), world, batch_size=batch_size)
    with shoal.Run(directory, step, loader, trackers=(), plan=plan) as run:
        for batch in loader.epochs(steps // 2):
            step(batch)
            run.tick()


@pytest.mark.parametrize(("factor", "told"), [(1e-6, 1), (1e6, 0)])
def test_a_run_is_compared_with_its_plan(
    world: shoal.World,
    tmp_path: Path,
    planned: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    factor: float,
    told: int,
) -> None:
    parts = {part: factor * seconds for part, seconds in planned["best"][0]["parts"].items()}
    plan = write(tmp_path / "plan.json", planned, parts=parts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(world, tmp_path / "run", plan, WARM_UP + WINDOW + 2)  # one complete window
    found = [each for each in caught if "planned in" in str(each.message)]
    assert len(found) == told
    for each in found:
        assert "Likely cause: " in str(each.message)
        assert each.filename == __file__  # the line of run.tick()
    began, ended = (
        line for line in read_events(path_of(tmp_path / "run", 0)) if line["event"] == "plan"
    )
    assert "measured" not in began
    assert sum(began["predicted"].values()) == pytest.approx(began["predicted_seconds"])
    assert began["predicted_seconds"] == pytest.approx(factor * planned["best"][0]["step_seconds"])
    assert ended["measured"].keys() == ended["predicted"].keys()
    assert 0 < ended["measured"]["forward and backward"] < ended["measured_seconds"]
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "planned" in each]
    assert line.startswith("planned ")
    assert line.endswith(f": {ended['difference']}")
    reader = Reader(tmp_path / "run")
    reader.poll()
    (finding,) = [each for each in find_bottleneck(reader.history).findings if "planned" in each.text]
    assert ended["difference"] in finding.text
    assert str(plan) in finding.text


def test_a_run_of_few_steps_has_no_comparison(
    world: shoal.World, tmp_path: Path, planned: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(world, tmp_path / "run", write(tmp_path / "plan.json", planned), 2)
    assert "planned" not in capsys.readouterr().out
    lines = [line for line in read_events(path_of(tmp_path / "run", 0)) if line["event"] == "plan"]
    assert len(lines) == 1


class Steps:
    """Steps of one second, by a made-up clock, with the warnings about them."""

    def __init__(self) -> None:
        self.predicted = {"forward and backward": 0.8, "optimizer": 0.1}
        self.predicted["communication and waiting"] = 0.1
        self.compared = PlannedSteps("plan.json", self.predicted)
        self.spent = [0] * (1 + len(PARTS))
        self.number = 0
        self.take(WARM_UP, {FORWARD: 50.0})  # compiles

    def take(self, count: int, more: dict[int, float] | None = None) -> list[str]:
        usual = {FORWARD: 0.3, BACKWARD: 0.5, COMMUNICATION: 0.1, UPDATE: 0.1}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                for part in usual.keys() | (more or {}).keys():
                    seconds = usual.get(part, 0.0) + (more or {}).get(part, 0.0)
                    self.spent[part] += round(seconds * SECOND)
                self.number += 1
                self.compared.step(self.number, tuple(self.spent))
        return [str(each.message) for each in caught]


def test_a_slow_part_is_told_once_and_again_if_it_worsens() -> None:
    steps = Steps()
    assert steps.take(3 * WINDOW, {WAIT: 0.19}) == []
    (text,) = steps.take(4 * WINDOW, {WAIT: 0.3})
    assert "a step takes 1.3 s, 1.30 times the 1 s planned in plan.json" in text
    assert "data loading: 300 ms, planned: none" in text
    assert "num_workers" in text
    assert steps.take(2 * WINDOW, {WAIT: 0.5}) == []
    (text,) = steps.take(2 * WINDOW, {WAIT: 0.3, COMMUNICATION: 0.4})
    assert "communication and waiting: 500 ms, planned: 100 ms" in text
    assert steps.take(2 * WINDOW) == []


def test_few_long_steps_are_not_told(tmp_path: Path) -> None:
    steps = Steps()
    for _ in range(WINDOW):
        assert steps.take(1, {FORWARD: 9.0}) + steps.take(2) == []
    events = Events(tmp_path / "rank-0.jsonl")
    steps.take(2 * WINDOW, {BACKWARD: 0.2})
    line = steps.compared.end(events)
    assert line is not None
    assert line.startswith("planned 1.00 s per step, measured 1.0")
    assert "forward and backward +" in line


def bad(path: Path, plan: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Files that are no plan of this run, and what is found of each."""
    best = plan["best"][0]
    no_parts = {name: each for name, each in best.items() if name != "parts"}
    texts = ("no JSON", "[1, 2]", json.dumps(no_parts), '{"best": [{"layout": "replicate=2"}]}')
    yield path / "absent.json", "No such file"
    for number, text in enumerate(texts):
        (path / f"{number}.json").write_text(text)
        yield path / f"{number}.json", "not the output of shoal plan --json"
    (path / "empty.json").write_text(json.dumps(plan | {"best": []}))
    yield path / "empty.json", "no configuration of this plan fits"
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"parts": best["parts"] | {"optimizer": -1.0}}, "not the output of shoal plan"),
        ({"devices": math.inf}, "not the output of shoal plan"),
        ({"devices": 8.7}, "not the output of shoal plan"),
        ({"micro_batch": -3}, "not the output of shoal plan"),
        ({"layout": None}, "not the output of shoal plan"),
        ({"devices": 8}, "for 8 devices, and this run has 1 rank"),
        ({"layout": "shard=1,tensor=1"}, "has replicate=1"),
        ({"global_batch": 64}, "64 samples, and this run has 4"),
    ]
    for changes, found in unfit:
        yield write(path / "changed.json", plan, **changes), found


def test_plans_that_do_not_fit_are_refused(
    world: shoal.World, tmp_path: Path, planned: dict[str, Any]
) -> None:
    for path, found in bad(tmp_path, planned):
        with pytest.raises(shoal.StepError) as raised:
            train(world, tmp_path / "run", path)
        assert found in raised.value.found
        assert str(path) in raised.value.given
    assert not (tmp_path / "run").exists()


def test_a_plan_with_a_pipeline(tmp_path: Path) -> None:
    done = cli.shoal(
        "plan", "--model", "llama-7b", "-n", "8", "--batch", "64", "--json", "--top", "100"
    )
    plans = json.loads(done.stdout)
    pipeline = next(each for each in plans["best"] if each["schedule"])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plans | {"best": [pipeline]}))
    plan = shoal.load_plan(path)
    for name in ("layout", "schedule", "micro_batches"):
        assert getattr(plan, name) == pipeline[name]


def test_auto_says_how_to_plan() -> None:
    with pytest.raises(shoal.LayoutError, match=r"shoal\.load_plan\('plan\.json'\)\.layout"):
        shoal.init(layout="auto")


def refused(world: shoal.World, directory: Path, plan: Path) -> str:
    """Train with a plan of which only rank 0 has the file."""
    with pytest.raises(shoal.StepError) as raised:
        train(world, directory, plan if world.is_rank_zero else plan.parent / "absent.json")
    return raised.value.found


def follows(world: shoal.World, directory: Path, plan: Path) -> int:
    train(world, directory, plan, 2)
    return sum(line["event"] == "plan" for line in read_events(path_of(directory, world.rank)))


@pytest.mark.processes
def test_rank_0_reads_the_plan_for_all_ranks(
    two: Ranks, tmp_path: Path, planned: dict[str, Any]
) -> None:
    wrong = write(tmp_path / "wrong.json", planned)
    fits = write(tmp_path / "fits.json", planned, devices=2, layout="replicate=2")
    found = two.call(refused, tmp_path / "refused", wrong)
    assert found == ["the plan is for 1 devices, and this run has 2 ranks"] * 2
    assert two.call(follows, tmp_path / "run", fits) == [1, 0]
