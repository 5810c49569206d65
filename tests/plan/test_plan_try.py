"""Layouts of a plan that are tried on this machine, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from helpers.cli import plan_error
from helpers.cli import shoal as command
from helpers.cluster.slurm import Cluster

MODEL = ("plan", "--model", "hidden=64,layers=2,heads=2,vocab=100,seq=32", "--precision", "fp32")
PLAN = (*MODEL, "--machine", "cpu", "-n", "2", "--batch", "16")
WORDS = ("--layout", "{layout}", "--run", "{run}", "--steps", "{steps}")
SCRIPT = """
import sys, time
import torch
import shoal

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(batch[1])

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with shoal.init(layout=given["--layout"], device="cpu", seed=0) as world:
    if world.rank == 1 and given["--layout"].startswith(given.get("--fail", "none")):
        raise ValueError("this layout fails")
    rows = torch.randn(64, 8)
    model = shoal.parallelize(torch.nn.Linear(8, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    loader = shoal.Loader((rows, rows[:, :1]), world, batch_size=16)
    with shoal.Run(given["--run"], step, loader, trackers=()) as run:
        for batch in loader.epochs(1 + int(given["--steps"]) // 4):
            if given["--layout"].startswith(given.get("--slow", "none")):
                time.sleep(0.05)
            step(batch)
            run.tick()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.processes
@pytest.mark.long
def test_the_fastest_measured_layout_comes_first(script: str, tmp_path: Path) -> None:
    predicted = json.loads(command(*PLAN, "--json").stdout)["best"]
    first, second = list(dict.fromkeys(each["layout"] for each in predicted))[:2]
    words = ("--", script, *WORDS, "--slow", first)
    done = command(*PLAN, "--try", "2", "--json", *words)
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert [each["layout"] for each in found["tried_layouts"]] == [second, first]
    assert found["tried_layouts"][1]["measured"] > max(0.05, found["tried_layouts"][0]["measured"])
    assert found["best"][0]["layout"] == second
    assert len(found["best"]) == len(predicted)
    saved = tmp_path / "plan.json"
    saved.write_text(done.stdout)
    plan = shoal.load_plan(saved)
    assert (plan.layout, plan.devices, plan.batch_size) == (second, 2, 16)
    assert plan.step_seconds == pytest.approx(found["best"][0]["step_seconds"])


@pytest.mark.long
@pytest.mark.processes
def test_the_script_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/plan-try.md").read_text()
    block = re.search(r"```py\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "train.py").write_text(block[1])
    layouts = re.search(
        r"```console\n\$ (shoal plan --model train.*?)\$ (shoal run[^\n]*)", page, re.DOTALL
    )
    assert layouts is not None
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for words in layouts.groups():
        done = subprocess.run(
            ["bash", "-c", words],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "planned" in done.stdout


@pytest.mark.system
@pytest.mark.long
def test_layouts_on_the_nodes_of_a_job(script: str, cluster: Cluster, tmp_path: Path) -> None:
    machine = tmp_path / "two.toml"
    machine.write_text(
        "[two]\nhalf = 1\nfp32 = 1\nmemory = 64\nmemory_bandwidth = 10\nlink = 1\nnetwork = 1\n"
        'devices = 1\ncores = 2\nsource = "test"\n'
    )
    words = (*MODEL, "--machine", str(machine), "-n", "2", "--batch", "16", "--json", "--try", "2")
    run = [sys.executable, "-m", "shoal", *words, "--", script, *WORDS]
    done = cluster.run(["salloc", "--nodes=2", *run])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["problem"] for each in found["tried_layouts"]] == ["", ""]
    assert found["best"][0]["layout"] == found["tried_layouts"][0]["layout"]


@pytest.mark.long
@pytest.mark.processes
def test_a_layout_that_fails_stays_behind(script: str) -> None:
    layouts = ("replicate=2", "shard=2")
    done = command(*PLAN, "--try", "2", "--", script, *WORDS, "--fail", layouts[0])
    assert done.exit_code == 0, done.exception
    table = done.stdout[done.stdout.index("Tried") :]
    assert "this layout fails" in " ".join(table.split())
    assert f"{layouts[1]} is the fastest" in table


@pytest.mark.long
@pytest.mark.processes
def test_layouts_that_all_fail_are_an_error(script: str) -> None:
    problem = plan_error(*PLAN, "--try", "1", "--", script, *WORDS, "--fail", "")
    assert "1 layout failed" in problem.found
    assert "this layout fails" in problem.found
    assert "shoal run -n 2" in problem.fix


def test_what_is_plan_error() -> None:
    for words, found in (
        ((*PLAN, "--try", "1", "--", "train.py", "{run}"), "no {layout}"),
        ((*PLAN, "--try", "1", "--", "train.py", "{layout}"), "no {run}"),
        ((*PLAN, "--try", "6", "--", "train.py", *WORDS), "--top 5 shows fewer"),
        ((*PLAN, "--try", "1", "--submit", "1", "--", "train.py", *WORDS), "both start"),
        ((*MODEL, "-n", "64", "--try", "1", "--", "train.py", *WORDS), "this machine has"),
        (("plan", "--model", "dense:", "--what-if", "network=2x"), "transformer"),
        (("plan", "--model", "dense:", "--layout", "auto", "--split-points", "1"), "equal FLOPs"),
        (("plan", "--model", "dense:", "--try", "2", "--", "t.py", *WORDS), "it is one layout"),
        (("plan", "--model", "dense:", "--check", "runs/a"), "dimensions of a transformer"),
        (("plan", "--model", "resnet50"), "neither a model"),
        ((*MODEL, "--split-points", "1"), "for a traced module"),
        (("plan", "--model", "dense:", "--stages", "2"), "search for layouts"),
        ((*MODEL, "--check", "runs/a", "--layout", "shard=2"), "that of the run"),
    ):
        assert found in plan_error(*words).found, words


def test_a_job_with_too_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    words = ("-n", "64", "--batch", "64", "--try", "1", "--", "train.py", *WORDS)
    problem = plan_error(*MODEL, *words)
    assert "the job has 2 nodes, of 8 devices each" in problem.found
    assert "-n 16" in problem.fix
