"""The GPU benchmarks and the suite: their arithmetic, and each of them on the CPU in a small size."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_suite
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gpt
import measuring
import resnet
import shoal
import stall

GPT = argparse.Namespace(layers=2, width=32, heads=2, context=16, words=96, batch=3)


def test_the_models_have_the_sizes_of_their_names() -> None:
    with torch.device("meta"):
        whole = gpt.GPT(argparse.Namespace(layers=24, width=1024, heads=16, context=1024, words=50304))
        assert sum(p.numel() for p in whole.parameters()) == pytest.approx(354e6, rel=0.01)
        for depth, expected in ((50, 25_557_032), (101, 44_549_160)):  # torchvision's
            model = resnet.build(argparse.Namespace(depth=depth, width=64))
            assert sum(p.numel() for p in model.parameters()) == expected


def test_the_flops_of_a_token_are_those_that_torch_counts() -> None:
    model, tokens = gpt.GPT(GPT), torch.zeros(GPT.batch, GPT.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == gpt.flops(GPT) * tokens.numel()


def test_the_state_of_a_stall_has_its_size() -> None:
    layers = stall.layers_for(8.0, 4096)
    assert layers * 4096**2 * stall.BYTES_PER_PARAMETER == pytest.approx(8e9, rel=0.02)
    assert stall.layers_for(0.0, 4096) == 1


def test_summaries() -> None:
    assert measuring.middle([3.0, 1.0, 2000.0], 1) == "3.0 (1.0 to 2,000.0)"
    assert measuring.ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]


def test_rounds_take_turns(world: shoal.World) -> None:
    taken: list[str] = []
    loops = {name: lambda name=name: taken.append(name) for name in "abc"}
    times = measuring.alternate(loops, world, rounds=2, steps=1)
    assert [len(found) for found in times.values()] == [2, 2, 2]
    assert "".join(taken[3 * measuring.WARM_UP :]) == "abcbca"


def test_a_table_says_where_and_when(world: shoal.World, capsys: pytest.CaptureFixture[str]) -> None:
    measuring.show("Subject", [{"loop": "a", "rate": "1"}, {"loop": "b", "rate": "2"}], world)
    first, *table = capsys.readouterr().out.splitlines()
    version = re.escape(torch.__version__)
    assert re.fullmatch(rf"Subject: 1 rank, CPU, torch {version}, \d{{4}}-\d\d-\d\d", first)
    assert table == ["", "| loop | rate |", "| --- | --- |", "| a | 1 |", "| b | 2 |"]


def test_the_suite_takes_half_an_hour_and_its_files_exist(repository: Path) -> None:
    for gpus in (1, 2, 8):
        parts = gpu_suite.parts(gpus, repository)
        assert sum(part.minutes for part in parts) <= 30
        scripts = [word for part in parts for word in part.command if word.endswith(".py")]
        assert len(scripts) == 5
        assert all(Path(script).exists() for script in scripts)
    on_one, on_eight = (
        {part.name: " ".join(part.command) for part in gpu_suite.parts(gpus, repository)}
        for gpus in (1, 8)
    )
    assert "run -n 1 " in on_one["resnet-50"]
    assert "run -n 2 " in on_one["memory"]
    assert on_eight["resnet-101"].endswith("--batch 2048 --depth 101")


def test_a_part_that_fails_or_hangs_leaves_its_output(tmp_path: Path) -> None:
    def run(name: str, code: str, minutes: float = 1.0) -> int:
        return gpu_suite.run_part(gpu_suite.Part(name, [sys.executable, "-c", code], minutes), tmp_path)

    assert run("fails", "print('here'); raise SystemExit(3)") == 3
    assert run("hangs", "import time; time.sleep(1e6)", 0.005) == gpu_suite.TIMED_OUT
    assert gpu_suite.run_part(gpu_suite.Part("lacks", ["no-such-command"], 1), tmp_path) == 127
    assert (tmp_path / "fails.txt").read_text() == "here\n"
    assert "stopped after 0.005 minutes" in (tmp_path / "hangs.txt").read_text()
    assert "no-such-command" in (tmp_path / "lacks.txt").read_text()


def test_the_page_lists_tests_and_benchmarks_that_exist(repository: Path) -> None:
    page = (repository / "docs/explanation/gpus.md").read_text()
    table = page.partition("## Not verified on GPUs\n")[2].partition("\n## ")[0]
    tests = "".join(path.read_text() for path in (repository / "tests/gpu").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", table)
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []
    scripts = re.findall(r"`(\w+\.py)`", table)
    assert {"gpt.py", "resnet.py", "stall.py", "memory.py"} == {*scripts}
    assert all((repository / "benchmarks/gpu" / name).exists() for name in scripts)


@pytest.mark.full
@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is here")
def test_the_suite_says_that_there_is_no_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, gpu_suite.__file__, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.partition(":")[0]) == (1, "No accelerator")
    assert not (tmp_path / "out").exists()


RUNS = {
    "gpt": (1, "--layers 1 --width 32 --heads 2 --context 16 --words 96 --batch 2"),
    "resnet": (1, "--width 4 --size 32 --batch 4"),
    "resnet on two": (2, "--width 4 --size 32 --batch 4"),
    "stall": (1, "--gigabytes 0.001 --width 64 --batch 8 --steps 2"),
    "memory": (2, "--layers 2 --width 64 --heads 2 --context 16 --words 96 --batch 2"),
}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.long] if each in ("resnet", "stall") else [])
        for each in RUNS
    ],
)
def test_a_benchmark_runs_on_the_cpu(repository: Path, tmp_path: Path, name: str) -> None:
    size, given = RUNS[name]
    script = name.partition(" ")[0]
    rounds = [] if script == "memory" else ["--rounds", "1"]
    steps = ["--steps", "1"] if script in ("gpt", "resnet") else []
    path = str(repository / f"benchmarks/gpu/{script}.py")
    launcher = ["-m", "shoal", "run", "-n", str(size)] if size > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, path, *given.split(), *rounds, *steps],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        # Compilation takes minutes on a CPU, and is the same for both loops.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert any("Shoal" in row[0] for row in rows)
    if script == "memory":
        ratio = next(float(row[2].strip(" |")) for row in rows if "Shoal" in row[0])
        assert ratio < 1.05
