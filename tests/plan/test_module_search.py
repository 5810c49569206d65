"""The search for layouts of a traced module, and the plans that scripts read from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shoal
from helpers.cli import shoal as command
from helpers.planned_models import MODELS
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Machine, find_machine
from shoal.tools.plan.search.fit import module_layouts, search_module
from shoal.tools.plan.search.search import SearchResult
from shoal.util.errors import ShoalError

SCRIPT = """
import torch, shoal
from torch import nn
from torch.nn.functional import cross_entropy

def build():
    loss = lambda output, batch: (cross_entropy(output, batch[1], reduction="sum"), len(output))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, shoal.Task(loss), (torch.randn(64, 64), torch.arange(64) % 10)
"""


def searched(name: str, machine: Machine, devices: int = 2, batch: int = 4) -> SearchResult:
    workload = Workload(*MODELS[name]())
    return search_module(lambda: workload, devices, batch, machine, precision="fp32")


def test_layouts_of_at_most_two_axes() -> None:
    node = replace(find_machine("h100-sxm"), devices=4)
    found = [str(each) for each in module_layouts(8, node)]
    assert len(set(found)) == len(found)
    # Five axes alone, ten pairs in two orders; tensor=8 and context=8 exceed a node.
    assert len(found) == 5 + 20 - 2
    assert found[:2] == ["replicate=8", "shard=8"]
    assert [str(each) for each in module_layouts(1, node)] == ["replicate=1"]


@pytest.mark.full
def test_the_fastest_comes_first_and_others_have_reasons() -> None:
    found = searched("MLP", find_machine("h100-sxm"))
    times = [each.step_seconds for each in found.best]
    assert times == sorted(times)
    names = [str(each.plan.layout) for each in found.best]
    assert {"replicate=2", "shard=2", "pipeline=2"} <= {*names}
    reasons = {str(each.layout): each.reason for each in found.rejected}
    assert "no repeated blocks" in reasons["context=2"]
    assert not set(names) & set(reasons)


@pytest.mark.long
def test_layouts_that_do_not_fit_are_traced_with_less_memory() -> None:
    usual = find_machine("h100-sxm")
    whole = searched("transformer", usual)
    needed = {str(each.plan.layout): each for each in whole.best}["replicate=2"].needed
    small = replace(usual, memory=usual.memory - usual.available + 0.6 * needed)
    found = searched("transformer", small)
    assert all(each.needed <= small.available for each in found.best)
    for each in found.best:
        if str(each.plan.layout) == "replicate=2":
            assert each.plan.micro_batch == 1 or each.plan.recompute == "full"


def test_a_module_that_fails_in_all_layouts_is_an_error() -> None:
    with pytest.raises(ShoalError, match="the dataset has 64"):
        searched("MLP", find_machine("h100-sxm"), batch=128)


@pytest.mark.long
def test_a_script_reads_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "train_here.py"
    path.write_text(SCRIPT)
    words = ("plan", "--model", f"{path}:build", "-n", "2", "--batch", "16", "--precision", "fp32")
    done = command(*words, "--layout", "auto", "--json", "--training", "steps=1000")
    assert done.exit_code == 0, done.exception
    values = json.loads(done.stdout)
    saved = tmp_path / "plan.json"
    saved.write_text(done.stdout)
    plan = shoal.load_plan(saved)
    assert plan.layout == values["best"][0]["layout"]
    assert plan.step_seconds == pytest.approx(values["best"][0]["step_seconds"], rel=0.1)
    assert values["best"][0]["training"]["seconds"] >= 1000 * values["best"][0]["step_seconds"]
    one = json.loads(command(*words, "--layout", "pipeline=2", "--micro-batch", "4", "--json").stdout)
    saved.write_text(json.dumps(one))
    plan = shoal.load_plan(saved)
    assert (plan.layout, plan.micro_batches) == ("pipeline=2", 4)
    assert plan.split_points == ("1",)
    page = tmp_path / "page"
    done = command(*words, "--layout", "auto", "--html", str(page))
    assert done.exit_code == 0, done.exception
    assert "The strategy of the first: shoal." in done.stdout
    assert "Fastest" in (page / "index.html").read_text()
