"""Memory that is traced on fake tensors, compared with the peak of torch's allocator in real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.cli import plan_error
from helpers.cli import shoal as command
from helpers.measured_memory import measured_peak
from helpers.planned_models import MODELS, SAMPLES, Built, classes
from helpers.ranks import Ranks
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.memory.estimate import RankMemory
from shoal.tools.plan.trace import trace_step
from shoal.tools.plan.work.planned_step import PlannedStep, Recompute
from shoal.util.errors import ShoalError

WITHIN = 0.05


def often(*values: object, cover: object, mark: pytest.MarkDecorator) -> list[Any]:
    """Return values as parameters: `cover` with a mark, and the others as long."""
    return [pytest.param(each, marks=mark if each == cover else pytest.mark.long) for each in values]


def planned(
    batch: int = 4, micro: int = 4, layout: str = "replicate=1", recompute: Recompute = "none"
) -> PlannedStep:
    return PlannedStep(
        layout=Layout.parse(layout),
        global_batch=batch,
        micro_batch=micro,
        recompute=recompute,
        precision="fp32",
    )


def traced(build: Callable[[], Built], plan: PlannedStep) -> RankMemory:
    return trace_step(lambda: Workload(*build()), plan).memory


@pytest.mark.parametrize(
    "name", ["MLP", *often(*sorted({*MODELS} - {"MLP"}), cover="LSTM", mark=pytest.mark.full)]
)
def test_the_peak_is_the_allocator_s(name: str, world: shoal.World, tmp_path: Path) -> None:
    plan = planned()
    measured = measured_peak(world, MODELS[name], plan, tmp_path / "trace.json")
    assert traced(MODELS[name], plan).total == pytest.approx(measured, rel=WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "ViT"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_activations(
    name: str, recompute: Recompute, world: shoal.World, tmp_path: Path
) -> None:
    plan = planned(8, 4, recompute=recompute)
    measured = measured_peak(world, MODELS[name], plan, tmp_path / "trace.json")
    found = traced(MODELS[name], plan)
    assert found.total == pytest.approx(measured, rel=WITHIN)
    assert found.kinds["activations"] < traced(MODELS[name], planned(8, 4)).kinds["activations"]


@pytest.mark.long
def test_a_stage_frees_the_modules_of_the_others() -> None:
    plan = replace(planned(8, 2, "pipeline=2"), split_points=("3",))
    parts = [trace_step(lambda: Workload(*MODELS["MLP"]()), plan, rank=rank).memory for rank in (0, 1)]
    one = traced(MODELS["MLP"], planned(8, 2))
    assert sum(part.kinds["parameters"] for part in parts) == one.kinds["parameters"]
    assert all(part.moment == "update" for part in parts)  # after all activations
    assert all(part.kinds["activations"] < 0.05 * part.kinds["parameters"] for part in parts)


SCHEDULED = [
    (name, schedule)
    for name in ("MLP", "transformer")
    for schedule in ("1f1b", "interleaved", "zero-bubble")
]


@pytest.mark.processes
@pytest.mark.parametrize("case", often(*SCHEDULED, cover=("MLP", "1f1b"), mark=pytest.mark.full))
def test_pipelines(case: tuple[str, str], tmp_path: Path) -> None:
    name, schedule = case
    plan = replace(planned(8, 2, "pipeline=2"), schedule=schedule)
    build = partial(Workload, *MODELS[name]())
    steps = [trace_step(build, plan, rank=rank) for rank in (0, 1)]
    with Ranks(2, layout="pipeline=2") as ranks:
        peaks = ranks.call(measured_on_rank, name, steps[0].plan, str(tmp_path / "trace.json"))
    assert [each.memory.total for each in steps] == pytest.approx(peaks, rel=WITHIN)


ON_RANKS = [
    *((layout, name) for layout in ("tensor=2", "context=2") for name in ("transformer", "ViT")),
    *(
        (layout, name)
        for layout in ("shard=2", "replicate=2")
        for name in ("transformer", "U-Net", "MLP")
    ),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", often(*ON_RANKS, cover=("shard=2", "MLP"), mark=pytest.mark.full))
def test_ranks(case: tuple[str, str], tmp_path: Path) -> None:
    layout, name = case
    plan = planned(layout=layout, micro=4 if layout in ("tensor=2", "context=2") else 2)
    path = str(tmp_path / "trace.json")
    with Ranks(2, layout=layout) as ranks:
        # In some trainings, buffers of two collectives live simultaneously.
        runs = [ranks.call(measured_on_rank, name, plan, path) for _ in range(3)]
    measured = min(min(peaks) for peaks in runs)
    assert traced(MODELS[name], plan).total == pytest.approx(measured, rel=WITHIN)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout", ["pipeline=2,tensor=2", "context=2,shard=2", "context=2,tensor=2", "pipeline=2,shard=2"]
)
def test_four_ranks(layout: str, tmp_path: Path) -> None:
    plan = planned(8, 2, layout)
    build = partial(Workload, *MODELS["transformer"]())
    steps = [trace_step(build, plan, rank=rank) for rank in range(4)]
    with Ranks(4, layout=layout) as ranks:
        path = str(tmp_path / "trace.json")
        peaks = ranks.call(measured_on_rank, "transformer", steps[0].plan, path)
    assert [each.memory.total for each in steps] == pytest.approx(peaks, rel=WITHIN)


def measured_on_rank(world: shoal.World, name: str, plan: PlannedStep, path: str) -> int:
    return measured_peak(world, MODELS[name], plan, Path(f"{path}-{world.rank}"))


class Tabled(nn.Module):
    """A small layer, and a large table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(500_000))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores


@pytest.mark.full
def test_the_checks_on_the_first_batch_are_traced(world: shoal.World, tmp_path: Path) -> None:
    def build() -> Built:
        return Tabled, shoal.Task(classes), (torch.zeros(SAMPLES, 4), torch.arange(SAMPLES) % 4)

    found = traced(build, planned())
    measured = measured_peak(world, build, planned(), tmp_path / "trace.json")
    assert found.moment == "checks"
    assert found.total == pytest.approx(measured, rel=0.01)
    # They keep a copy of the table.
    assert found.total == pytest.approx(2 * found.kinds["parameters"], rel=0.01)


class Branching(nn.Module):
    """A module whose forward depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(4, 4), Gate()

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.gate(self.first(x))
        return gated


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def branching() -> Built:
    return Branching, shoal.Task(classes), (torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 4)


def test_a_module_that_fails_on_fake_tensors_is_named() -> None:
    with pytest.raises(ShoalError) as caught:
        traced(branching, planned())
    assert "module gate (Gate) on fake tensors" in caught.value.given
    assert "--measure" in caught.value.fix
    found = trace_step(lambda: Workload(*branching()), planned(), fake=False).memory
    assert found.kinds["parameters"] == 4 * (4 * 4 + 4)
    assert found.kinds["gradients"] == found.kinds["parameters"]
    plan = planned(micro=2, layout="shard=2")  # the values of the other rank are missing
    assert trace_step(lambda: Workload(*branching()), plan, fake=False).memory.kinds["parameters"] == 40


@pytest.mark.full
def test_a_rank_of_many_holds_its_shard() -> None:
    one, many = (traced(MODELS["MLP"], planned(16, 16 // size, f"shard={size}")) for size in (1, 16))
    assert many.kinds["parameters"] == pytest.approx(one.kinds["parameters"] / 16, rel=0.05)
    assert many.kinds["optimizer"] == pytest.approx(one.kinds["optimizer"] / 16, rel=0.05)
    assert many.kinds["communication"] > one.kinds["communication"]


@pytest.mark.full
def test_the_model_of_the_caller_does_not_change() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    traced(lambda: (model, *branching()[1:]), planned())
    assert torch.equal(model.weight, before)
    assert type(model.weight) is nn.Parameter


SCRIPT = """
import torch, shoal
from torch import nn
from torch.nn.functional import cross_entropy

def build():
    loss = lambda output, batch: (cross_entropy(output, batch[1], reduction="sum"), len(output))
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, shoal.Task(loss), (torch.randn(4096, 64), torch.arange(4096) % 10)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train_here.py"
    path.write_text(SCRIPT)
    return f"{path}:build"


def small_machine(tmp_path: Path, megabytes: float) -> str:
    path = tmp_path / "small.toml"
    path.write_text(
        f"[small]\nhalf = 1\nfp32 = 1\nmemory = {1.5 + megabytes / 1000}\nmemory_bandwidth = 10\n"
        'link = 1\nnetwork = 1\ndevices = 4\nsource = "test"\n'
    )
    return str(path)


@pytest.mark.long
def test_a_command_that_does_not_fit_names_a_change(script: str, tmp_path: Path) -> None:
    machine = small_machine(tmp_path, 5.0)
    options = ("-n", "2", "--batch", "4096", "--precision", "fp32", "--machine", machine)
    done = command("plan", "--model", script, *options)
    assert done.exit_code == 1, done.output
    assert "does not fit" in done.stdout
    assert "--micro-batch 1" in done.stdout


def test_a_batch_that_does_not_divide(script: str) -> None:
    error = plan_error("plan", "--model", script, "-n", "3", "--batch", "64")
    assert "--batch 63" in error.fix
    assert error.given == "--batch 64 --layout replicate=-1 -n 3"
    assert "a multiple of 3 samples" in error.found
    error = plan_error("plan", "--model", script, "-n", "2", "--batch", "64", "--micro-batch", "5")
    assert "--micro-batch 5" in error.given
    assert "--batch 60" in error.fix


def test_values_of_a_function_that_are_wrong(tmp_path: Path) -> None:
    for number, (made, found) in enumerate(
        {
            "None, task, data": "it returned (NoneType, Task, tuple), not (model, task, dataset)",
            "model(), data, task": "it returned (Linear, tuple, Task)",
            "model()": "it returned Linear",
            "lambda: 3, task, data": "a function that returns int, not a module",
            "lambda: 1 / 0, task, data": "it raises ZeroDivisionError",
        }.items()
    ):
        path = tmp_path / f"build_wrong_{number}.py"
        path.write_text(
            "import torch, shoal\n"
            "model, data = lambda: torch.nn.Linear(2, 2), (torch.ones(8, 2), torch.ones(8, 2))\n"
            "task = shoal.Task(lambda output, batch: (output.sum(), len(output)))\n"
            f"def build():\n    return {made}\n"
        )
        error = plan_error("plan", "--model", f"{path}:build", "-n", "1", "--batch", "4")
        assert found in error.found, made


class Read(nn.Module):
    """Layers whose size is read from a tensor while they are made."""

    def __init__(self) -> None:
        super().__init__()
        count = int(torch.prod(torch.tensor([8, 16])).item())
        self.layers = nn.Sequential(nn.Linear(8, count), nn.Linear(count, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def truncated() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return layer


def eight(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Built:
    """Return a model of eight numbers with its task and data."""
    rows = torch.ones(64, 8, dtype=dtype)
    task = shoal.Task(lambda out, batch: ((out - batch[1]).square().sum(), len(batch[1])))
    return make, task, (rows, rows)


def test_functions_that_read_values_or_convert_the_model() -> None:
    half = torch.bfloat16
    for name, made, count, width in (
        ("reads", eight(Read), 8 * 128 + 128 + 128 * 8 + 8, 4),
        ("truncated", eight(truncated), 72, 4),
        ("double", eight(lambda: nn.Linear(8, 8).double(), torch.float64), 72, 8),
        ("half", eight(lambda: nn.Linear(8, 8).to(half), half), 72, 2),
    ):
        assert traced(partial(tuple, made), planned()).kinds["parameters"] == width * count, name


SHAPES = """
import torch, shoal

def build():
    task = shoal.Task(lambda out, batch: (out.sum(), len(out)))
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(9, 8))
    return layers, task, (torch.ones(64, 8), torch.ones(64, 8))
"""


def test_a_model_with_wrong_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.py"
    path.write_text(SHAPES)
    options = ("-n", "2", "--batch", "16", "--precision", "fp32", "--machine", "cpu")
    for layout in ("pipeline=2", "auto"):
        error = plan_error("plan", "--model", f"{path}:build", "--layout", layout, *options)
        assert "must have same reduction dim" in error.found, layout


def test_a_compiled_model() -> None:
    with pytest.raises(ShoalError, match="compiled code"):
        traced(lambda: eight(lambda: torch.compile(nn.Linear(8, 8))), planned())  # type: ignore[arg-type,return-value]


def test_options_that_do_not_fit_the_layout() -> None:
    for options, found in (
        (("--schedule", "zbv"), "no pipeline"),
        (("--split-points", "1"), "no pipeline"),
        (("--layout", "replicate=3"), "3 processes"),
        (("--layout", "pipeline=2", "--batch", "15"), "a multiple of 2 samples"),
        (("--html", __file__), "it is a file"),
    ):
        error = plan_error("plan", "--model", "dense:", "-n", "2", *options)
        assert found in error.found, options


@pytest.mark.parametrize("text", ["import sys\nsys.exit(3)", "import argparse\n{parser}"])
def test_a_script_that_ends_when_it_is_imported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ends.py"
    parser = "p = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\np.parse_args()"
    path.write_text(text.format(parser=parser))
    error = plan_error("plan", "--model", f"{path}:build", "-n", "1")
    assert "it ends with exit code" in error.found
    assert "__main__" in error.fix


@pytest.mark.full
def test_the_stages_of_a_schedule_are_in_the_plan(tmp_path: Path) -> None:
    words = ("--layout", "pipeline=2", "--schedule", "zbv", "--precision", "fp32", "--json")
    model = "dense:layers=2,width=8,inputs=8"
    done = command("plan", "--model", model, "-n", "2", "--batch", "16", *words)
    assert done.exit_code == 0, done.exception
    (found,) = json.loads(done.stdout)["tried"]
    assert (found["stages_per_rank"], len(found["split_points"])) == (2, 3)
    assert found["micro_batches"] == 8


def test_the_rank_of_a_pipeline_that_needs_most_is_named(script: str) -> None:
    options = ("-n", "2", "--layout", "pipeline=2", "--batch", "16", "--micro-batch", "8")
    done = command("plan", "--model", script, *options, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["tried"]
    # Stages of equal FLOPs: the first layer has most parameters, and the others belong to stage 1.
    assert found["split_points"] == ["1"]
    assert found["pipeline_rank"] == 0
    assert found["memory"]["parameters"] == 4 * (64 * 1024 + 1024)
    assert found["margin_bytes"] > 0


def test_wrong_split_points(script: str) -> None:
    for points in ("9", "0"):
        options = ("-n", "2", "--layout", "pipeline=2", "--batch", "64", "--split-points", points)
        error = plan_error("plan", "--model", script, *options)
        assert f"--split-points {points}" in error.given


@pytest.mark.full
def test_a_dataset_that_is_too_small(script: str) -> None:
    error = plan_error("plan", "--model", script, "-n", "1", "--batch", "8192")
    assert "the dataset has 4096" in error.found


@pytest.mark.full
def test_the_work_of_a_convolution_is_that_of_its_matrix_product() -> None:
    def build() -> Workload:
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 4))
        return Workload(model, shoal.Task(classes), (torch.randn(SAMPLES, 3, 4, 4), targets))

    targets = torch.arange(SAMPLES) % 4
    work = trace_step(build, planned()).work
    samples, pixels = 4, 16
    # Forward, and both gradients; the first layer needs no gradient of its input.
    assert work.convolutions == 2 * samples * pixels * 8 * (3 * 9) * 2
    assert work.products == 2 * samples * (8 * 16) * 4 * 3
    assert work.traffic > 0
