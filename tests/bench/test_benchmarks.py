"""Each driver in `benchmarks/` runs at a tiny size, and ends with one line of figures in JSON."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.cluster.slurm import missing

# At the end: names such as `harness` are common.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
harness: Any = importlib.import_module("harness")

# Other drivers in `gpu/` have their own tests, and pictures those in tests/docs.
OPTION = "option_cost --width 16 --layers 1 --context 8 --batch 4 --rounds 1 --steps 1 --what"
PROCESSES = (
    "gpu/compile_time --layers 2 --width 16 --context 8 --words 32 --rounds 1 --steps 1",
    "asynchronous --seeds 1 --epochs 1 --steps 10 --ways int8",
    "data_libraries --libraries memmap Parquet",
    "exact_layers --ranks 2 --networks GPT",
    "first_step --models mlp --rounds 1",
    "launcher_ends --launchers shoal --seconds 3",
    "guards --strategies single --flips 1",
    "measured_shares --width 16 --batch 16 --rounds 1 --steps 1 --adapt 0.1",
    f"{OPTION} batch-norm --ways torch batch",
    f"{OPTION} random --ways torch samples",
    f"{OPTION} bits -n 2",
    f"{OPTION} verify",
    f"{OPTION} hangs -n 2",
    f"{OPTION} preemption -n 2",
    "overhead --models tiny -n 2 --rounds 1 --steps 2",
    "overhead --models dense -n 1 --batch 4 --rounds 1 --steps 1",
    "parallel --ways 1F1B --rounds 1 --steps 1",
    "plan_machine --steps 1 --edge 32 --batch 2",
    "plan_memory --layouts replicate=1 --models MLP --runs 1",
    "plan_search --devices 8 --repeats 1",
    "experts --width 64 --layers 1 --rounds 1 --steps 1",
    "pretrained --width 64 --layers 2 --rounds 1",
    "remote --width 16 --rows 2 --rounds 1",
    "start --rounds 1 --kills 1",
)
SYSTEM = (
    "chaos --kills 1 --strategies ddp --results chaos.jsonl --scratch chaos",
    "chaos_outages --where network --seeds 1 --faults node",
    "chaos_peers --peers Shoal --seeds 0",
)
CLUSTER = (
    "chaos_slurm --minutes 2",
    "chaos_slurm --what preemption --modes requeue-0 --seeds 1",
    "network --what methods --rates none --rounds 1",
    "network --what overlap --rates none --models linear --rounds 1 --steps 1",
    "plan_processes --what network --nodes 2 --rates none --steps 4",
    "plan_rehearsal --minutes 2",
)
TABLES = {"plan_accuracy": "it reads tables that Shoal does not ship"}
SHARED = (
    "harness",
    "loops",
    "cluster",
    "disturbed",
    "guards_training",
    "plan_peers",
    "plan_calibration",
    "plan_errors",
    "plan_tables",
)
PICTURES = ("monitoring_pictures", "pipeline_picture", "same_loss")


def figures(command: str, repository: Path, folder: Path) -> Any:
    name, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(repository / f"benchmarks/{name}.py"), *arguments, "--json"],
        cwd=folder,
        # Compilation takes minutes on a CPU.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_driver_is_run_by_a_test(repository: Path) -> None:
    run = {command.split()[0] for command in (*PROCESSES, *SYSTEM, *CLUSTER)}
    named = {name for name in (*run, *TABLES, *SHARED, *PICTURES) if "/" not in name}
    assert named == {path.stem for path in (repository / "benchmarks").glob("*.py")}


@pytest.mark.full(rows="all")
@pytest.mark.processes
@pytest.mark.parametrize("command", PROCESSES)
def test_a_benchmark_with_ranks_runs(command: str, repository: Path, tmp_path: Path) -> None:
    assert figures(command, repository, tmp_path)


@pytest.mark.system
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("command", SYSTEM)
def test_a_benchmark_with_namespaces_runs(command: str, repository: Path, tmp_path: Path) -> None:
    assert figures(command, repository, tmp_path)


@pytest.mark.peers
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_shoal_in_ray_train_under_kills(repository: Path, tmp_path: Path) -> None:
    [row] = figures("chaos_peers --peers Shoal-on-Ray --seeds 0", repository, tmp_path)["chaos_peers"]
    assert (row["kills"], row["samples repeated"], row["samples skipped"]) == (4, 0, 0)
    assert float(row["from one process"]) < 1e-5


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.system
@pytest.mark.skipif(bool(missing()), reason=missing() or "")
@pytest.mark.parametrize("command", CLUSTER)
def test_a_benchmark_on_a_cluster_runs(command: str, repository: Path, tmp_path: Path) -> None:
    assert figures(command, repository, tmp_path)


def test_rounds_take_turns() -> None:
    taken: list[str] = []
    actions = {name: partial(taken.append, name) for name in "abc"}
    found = harness.alternate(actions, 2, uncounted=1)
    assert "".join(taken) == "cab" + "abc" + "bca"
    assert [len(each) for each in found.values()] == [2, 2, 2]
    found = harness.alternate(actions, 5, goes_on=lambda: False)
    assert [len(each) for each in found.values()] == [1, 1, 1]


def test_summaries() -> None:
    many = [*range(1, 21)]
    assert harness.spread([3.0, 1.0, 2.0]) == harness.Spread(median=2.0, low=1.0, high=3.0)
    assert harness.quartiles([7.0]) == harness.Spread(median=7.0, low=7.0, high=7.0)
    # The interval of 20 values is from the 6th to the 15th (Conover 1999).
    assert harness.interval(many) == harness.Spread(median=10.5, low=6, high=15)
    rows = harness.time_rows({"a": [0.001, 0.002], "b": [0.002, 0.002]}, "a")
    assert rows[1]["/ a"].median == 1.5
    assert math.isclose(rows[1]["ms"].median, 2.0)


def test_a_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    harness.show("Subject", [{"loop": "a", "ms": 0.25}, {"loop": "b", "ms": 1234.5, "n": 1}])
    assert capsys.readouterr().out.split("\n")[1:-2] == [
        "Subject",
        "",
        "| loop | ms    | n   |",
        "| ---- | ----- | --- |",
        "| a    | 0.250 |     |",
        "| b    | 1,234 | 1   |",
    ]
