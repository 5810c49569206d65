from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import plan_error, shoal


def test_text_and_page(tmp_path: Path) -> None:
    words = ("--machine", "a100-80", "-n", "8", "--batch", "64", "--html", str(tmp_path))
    done = shoal("plan", "--model", "llama-7b", *words)
    assert done.exit_code == 0, done.output
    for part in (
        *("Fastest", "Step of the first", "Memory of the first", "optimizer"),
        *("is the median", "replicate=8", "does not fit: "),
    ):
        assert part in done.stdout
    page = (tmp_path / "index.html").read_text()
    for part in ("is the fastest", "exposed data parallel", "optimizer", "does not fit"):
        assert part in page
    assert (tmp_path / "step.svg").exists()
    assert "products" in (tmp_path / "step.csv").read_text()


def test_json() -> None:
    done = shoal("plan", "--model", "llama-7b", "-n", "8", "--batch", "64", "--top", "2", "--json")
    found = json.loads(done.stdout)
    first, second = found["best"]
    assert first["step_seconds"] <= second["step_seconds"]
    low, high = first["band"]
    assert 0.8 < low / first["step_seconds"] < 1 < high / first["step_seconds"] < 1.3
    assert sum(first["step"].values()) == pytest.approx(first["step_seconds"])
    assert first["memory_bytes"] <= found["available_bytes"]
    assert 0.2 < first["mfu"] < 0.8


def test_layouts_stay_on_one_line_of_a_terminal_with_80_columns() -> None:
    size = ("-n", "256", "--batch", "2048", "--top", "9")
    asked = ("--what-if", "network=2x", "--training", "steps=100,price=2")
    words = ("plan", "--model", "llama-70b", *size, *asked)
    found = json.loads(shoal(*words, "--json").stdout)
    lines = shoal(*words).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [*found["best"], *found["rejected"][:8], *found["what_if"]]
    assert any(len(each["layout"]) > 25 for each in shown)
    for each in shown:
        assert any(each["layout"] in line.split() for line in lines), each["layout"]


def test_small_layers_have_a_warning() -> None:
    done = shoal("plan", "--model", "gpt2", "-n", "8", "--batch", "8", "--machine", "b200")
    assert "wait for the host" in " ".join(done.stdout.split())


def test_nothing_fits() -> None:
    done = shoal("plan", "--model", "gpt3-175b", "-n", "1", "--batch", "1")
    assert done.exit_code == 1
    assert "No configuration fits" in done.stdout


def test_a_given_layout() -> None:
    words = ("plan", "--model", "llama-7b", "--machine", "a100-80", "-n", "8", "--batch", "64")
    for layout, code, verdict in (("shard=-1", 0, " fits: "), ("replicate=8", 1, "does not fit: ")):
        done = shoal(*words, "--layout", layout, "--recompute", "full")
        assert done.exit_code == code
        text = " ".join(done.stdout.split())
        assert verdict in text
        for part in ("is the median", "optimizer", "per step and"):
            assert part in text
        found = json.loads(shoal(*words, "--layout", layout, "--recompute", "full", "--json").stdout)
        assert found["fits"] == (code == 0)
        first = [*found["best"], *found["rejected"]][0]
        assert (first["layout"], first["recompute"]) == (layout.replace("-1", "8"), "full")
    for option in (("--schedule", "zbv"), ("--stages", "2")):
        assert "no pipeline" in plan_error(*words, "--layout", "shard=8", *option).found


def test_an_unknown_precision() -> None:
    error = plan_error("plan", "--model", "gpt2", "--precision", "int4")
    assert "--precision mixed" in error.fix


def test_any_precision_tries_all_and_says_that_results_differ() -> None:
    words = ("plan", "--model", "llama-7b", "--machine", "a100-80", "-n", "8", "--batch", "64")
    done = shoal(*words, "--precision", "any", "--top", "40")
    assert "Compare losses" in done.stdout
    found = json.loads(shoal(*words, "--precision", "any", "--json").stdout)["best"][0]
    alone = [
        json.loads(shoal(*words, "--precision", name, "--json").stdout)["best"][0]
        for name in ("mixed", "fp16", "half", "fp32")
    ]
    assert found == min(alone, key=lambda each: each["step_seconds"])


def test_the_table_has_the_schedule_of_pipelines() -> None:
    # Between nodes, only a pipeline is fast enough.
    words = ("plan", "--model", "llama-70b", "--machine", "h100-sxm", "-n", "64", "--batch", "128")
    found = json.loads(shoal(*words, "--json").stdout)
    piped = [each for each in (*found["best"], *found["rejected"]) if "pipeline" in each["layout"]]
    assert {each["schedule"] for each in piped} - {"1f1b"}
    for each in piped:
        assert f'schedule="{each["schedule"]}"' in each["strategy"]
    if found["best"][0]["schedule"] not in ("1f1b", None):
        assert found["best"][0]["schedule"] in shoal(*words).stdout


def test_a_traced_module_has_one_precision() -> None:
    plan_error("plan", "--model", "dense:layers=1", "--precision", "any")


@pytest.mark.full
def test_the_pages_of_a_traced_module(tmp_path: Path) -> None:
    asked = ("--layout", "replicate=2", "-n", "2", "--batch", "8", "--precision", "fp32")
    machine = tmp_path / "small.toml"
    lines = ("half = 1", "fp32 = 1", "memory = 1.501", "memory_bandwidth = 50", "link = 10")
    machine.write_text("\n".join(("[small]", *lines, "network = 1", "devices = 2", 'source = "<b>"')))
    fits = ("replicate=2 on cpu fits", "fragmentation", "all-reduce", "launch and host")
    changes = ("does not fit", "--layout shard=2", "usable memory")
    for name, code, parts in (("cpu", 0, fits), (str(machine), 1, changes)):
        words = ("--machine", name, "--html", str(tmp_path))
        done = shoal("plan", "--model", "dense:layers=1", *asked, *words)
        assert done.exit_code == code, done.output
        page = (tmp_path / "index.html").read_text()
        for part in parts:
            assert part in page
