"""The GPU benchmarks and the suite: their arithmetic, and each of them on the CPU in a small size."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_suite
import psutil
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gpt
import measuring
import resnet
import shoal
import stall
from helpers.commands import GONE_WITHIN, wait_for

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


def test_rounds_take_turns(world: shoal.World) -> None:
    taken: list[str] = []
    loops = {name: lambda name=name: taken.append(name) for name in "abc"}
    makers = {name: lambda loop=loop: loop for name, loop in loops.items()}
    found = measuring.alternate(makers, world, rounds=2, steps=1)
    assert [len(times) for times, _ in found.values()] == [2, 2, 2]
    assert [peak for _, peak in found.values()] == [None] * 3  # the CPU counts no bytes
    assert "".join(taken[3 * measuring.WARM_UP :]) == "abcbca"
    found = measuring.alternate(makers, world, rounds=2, steps=1, seconds=0.0)
    assert [len(times) for times, _ in found.values()] == [1, 1, 1]


def test_figures_are_medians_relative_to_the_plain_loop() -> None:
    found = {
        "plain": measuring.Measured([0.1, 0.3, 0.2], None),
        "Shoal": measuring.Measured([0.2, 0.3, 0.1], 2_500_000),
    }
    assert measuring.figures_of(found, "plain") == {
        "plain": {"step_ms": 200.0, "rounds": 3},
        "Shoal": {"step_ms": 200.0, "rounds": 3, "throughput / plain": 1.0, "peak_mb": 2.5},
    }


def test_a_table_says_where_and_when(world: shoal.World, capsys: pytest.CaptureFixture[str]) -> None:
    measuring.show("Subject", [{"loop": "a", "rate": "1"}, {"loop": "b", "rate": "2"}], world)
    first = capsys.readouterr().out.splitlines()[1]
    version = re.escape(torch.__version__.partition("+")[0])  # wheels differ in what follows
    assert re.fullmatch(rf"Subject: 1 rank, CPU, .*torch {version}\S*, .*, \d{{4}}-\d\d-\d\d", first)


def fixed(name: str, fraction: float, least: float = 0.0, code: str = "") -> gpu_suite.Part:
    return gpu_suite.Part(name, lambda _: [sys.executable, "-c", code], fraction, least)


def test_parts_share_the_time_that_remains() -> None:
    parts = [fixed("a", 3), fixed("b", 2), fixed("c", 1, 50.0)]
    assert gpu_suite.limit_of_first(parts, 60.0) == 30.0
    assert gpu_suite.limit_of_first(parts[1:], 60.0) == 40.0  # the first one left its time
    assert gpu_suite.limit_of_first(parts[2:], 60.0) == 60.0
    assert gpu_suite.limit_of_first(parts[2:], 49.0) is None
    assert gpu_suite.limit_of_first(parts, -1.0) is None


@pytest.mark.parametrize("minutes", [2, 9, 30])
def test_no_part_is_skipped_for_those_before_it(minutes: float, tmp_path: Path) -> None:
    """All take as long as they may: together, they take the time that is there."""
    parts, remaining = gpu_suite.parts(1, tmp_path, minutes), 60.0 * minutes
    limits = {}
    for number, part in enumerate(parts):
        limits[part.name] = gpu_suite.limit_of_first(parts[number:], remaining)
        remaining -= limits[part.name] or 0.0
    assert remaining >= -1e-6
    if minutes >= 9:
        assert None not in limits.values()
    if minutes == 9:
        first = [limits[name] for name in ("strategies", "tests", "gpt", "resnet-50", "stall")]
        assert first == pytest.approx([120, 60, 120, 60, 60], rel=0.15)


def test_the_commands_of_parts_suit_the_number_of_gpus(repository: Path, tmp_path: Path) -> None:
    on_one, on_eight = (
        {part.name: " ".join(part.command(60.0)) for part in gpu_suite.parts(gpus, tmp_path, 9)}
        for gpus in (1, 8)
    )
    assert "shoal run" not in on_one["resnet-50"].replace("-m shoal", "shoal")
    assert "run -n 2 " in on_one["memory"]
    assert "run -n 8 " in on_eight["resnet-101"]
    assert "--batch 2048 --depth 101 --json --seconds=48" in on_eight["resnet-101"]
    assert on_one["strategies"].endswith("--session-timeout=39 --timeout=18")
    scripts = [word for text in on_one.values() for word in text.split() if word.endswith(".py")]
    assert all((repository / script).exists() for script in scripts)


def test_the_figures_of_a_part_are_read_from_its_output() -> None:
    text = '{"a": 1}\n{"a": {"b": 2}}\n{broken}\nended after 3 s\n'
    assert gpu_suite.figures_in(text) == {"a": {"b": 2}}
    assert list(gpu_suite.flattened({"a": {"b": 2}, "c": 3})) == ["   a, b: 2", "   c: 3"]
    text = "FAILED tests/a.py::test_b[c] - Error\n1 failed, 30 passed, 2 errors in 12.31s\n"
    assert gpu_suite.figures_in(text) == {
        "failed": 1, "passed": 30, "errors": 2, "failures": ["tests/a.py::test_b[c]"]
    }  # fmt: skip
    assert gpu_suite.figures_in("") == {}


@pytest.mark.full
def test_parts_that_fail_or_hang_leave_their_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'],"
        " start_new_session=True)\n"
        "print(child.pid); print('{\"known\": 1}'); time.sleep(1e6)"
    )
    parts = [
        fixed("fails", 10, code="print('here'); raise SystemExit(3)"),
        gpu_suite.Part("lacks", lambda _: ["no-such-command"], 10, 0),
        fixed("hangs", 1, code=hangs),
        fixed("long", 10, 1e6),
        fixed("works", 10, code="print('{\"figure\": 2}')"),
    ]
    results = gpu_suite.run_parts(parts, 120 + gpu_suite.ENDING, tmp_path, {"device": "none"})
    assert json.loads((tmp_path / "results.json").read_text()) == results
    found = results["parts"]
    codes = {name: each.get("exit_code") for name, each in found.items()}
    assert codes == {"fails": 3, "lacks": 127, "hangs": 124, "long": None, "works": 0}
    assert (tmp_path / "fails.txt").read_text() == "here\n"
    assert "no-such-command" in (tmp_path / "lacks.txt").read_text()
    output = (tmp_path / "hangs.txt").read_text()
    assert "ended after" in output
    wait_for(lambda: not psutil.pid_exists(int(output.splitlines()[0])), GONE_WITHIN)
    assert found["hangs"]["figures"] == {"known": 1}
    assert found["works"]["figures"] == {"figure": 2}
    assert "remained" in found["long"]["skipped"]
    printed = capfd.readouterr().out
    assert "   figure: 2\n" in printed
    assert "== long: skipped" in printed


@pytest.mark.full
@pytest.mark.processes
def test_the_suite_runs_on_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, gpu_suite.__file__, str(tmp_path), "--minutes", "30", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stdout
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert list(parts) == [part.name for part in gpu_suite.parts(1, tmp_path, 30)]
    assert parts["strategies"]["figures"]["passed"] == 1
    assert {"eager", "compiled"} == {*parts["gpt"]["figures"]}
    assert "throughput / plain" in parts["resnet-101"]["figures"]["Shoal, rank"]
    assert "stall_s" in parts["stall"]["figures"]["Shoal"]
    assert parts["memory"]["figures"]["Shoal"]["tracked_mb"] > 0


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
    "resnet": "--width 4 --size 32 --batch 4 --rounds 1 --steps 1",
    "memory": "--layers 2 --width 64 --heads 2 --context 16 --words 96 --batch 2",
}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_on_two_ranks(repository: Path, tmp_path: Path, name: str) -> None:
    """The dry run of the suite has the others."""
    path = str(repository / f"benchmarks/gpu/{name}.py")
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", "2", path, *RUNS[name].split()],
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
    if name == "memory":
        ratio = next(float(row[2].strip(" |")) for row in rows if "Shoal" in row[0])
        assert ratio < 1.05
