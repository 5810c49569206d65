"""Predicted and measured step times of convolutional networks on this machine.

    python benchmarks/plan_machine.py
    python benchmarks/plan_machine.py --operations      # also by kind of operation
    python benchmarks/plan_machine.py --steps 3 --edge 32 --batch 2      # a short try

It measures the machine as `shoal bench machine` does, traces one step of each network, and compares the
predicted time with the median of measured steps. The machine must be idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.planned_models import UNet, classes, values
from shoal._torch.dispatch import TorchDispatchMode
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.machine.measure import LinkRates, machine_toml, measure_machine
from shoal.tools.plan.time.layer_time import Work, compute_seconds
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.trace import trace_step
from shoal.tools.plan.work.traced_work import operation_work


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels with BatchNorm, and a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            skipped = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.skip = nn.Sequential(skipped, nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.path(x) + self.skip(x))
        return y


def resnet50() -> nn.Module:
    """Return ResNet-50 (He et al. 2016) with strides as in torchvision: 25,557,032 parameters."""
    parts: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)),
        *(nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)),
    ]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Operations(TorchDispatchMode):
    """Dispatch mode that sums the measured seconds and the work of each kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, Work] = defaultdict(Work)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        begun = time.perf_counter()
        result = function(*arguments, **(named or {}))
        taken = time.perf_counter() - begun
        if not function.is_view:
            self.seconds[str(function)] += taken
            self.work[str(function)] += operation_work(function, arguments, named or {}, result)
        return result


def print_operations(built: Workload, batch: int, plan: PlannedStep, machine: Machine) -> None:
    """Print the kinds of operations that take most of a step, measured and predicted."""
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(built.model, world)
        step = shoal.Step(model, torch.optim.AdamW(model.parameters()), built.task)
        first, *_, last = itertools.islice(
            shoal.Loader(built.dataset, world, batch_size=batch).epochs(3), 3
        )
        step(first)
        with Operations() as found:
            step(last)
    for name in sorted(found.seconds, key=found.seconds.__getitem__, reverse=True)[:12]:
        predicted = compute_seconds(found.work[name], plan, machine).total
        print(f"  {name:45}measured {found.seconds[name]:.3f} s, predicted {predicted:.3f} s")


def workload(make: Callable[[], nn.Module], *, edge: int, batch: int, image: bool) -> Workload:
    """Return a network with images of `edge` pixels, which it classifies or reproduces."""
    pixels = torch.randn(batch, 3, edge, edge)
    targets = pixels.clone() if image else torch.arange(batch) % 10
    return Workload(make, shoal.Task(values if image else classes), (pixels, targets))


def measured_seconds(built: Workload, batch: int, steps: int) -> float:
    """Return the median of the seconds of steps, after two that warm up."""
    times = []
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(built.model, world)
        step = shoal.Step(model, torch.optim.AdamW(model.parameters()), built.task)
        for one in shoal.Loader(built.dataset, world, batch_size=batch).epochs(steps + 2):
            begun = time.perf_counter()
            step(one)
            times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def main() -> None:
    """Print the machine, then predicted and measured seconds per network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--edge", type=int, default=128, help="pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--operations", action="store_true", help="also print kinds of operations")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = measure_machine("here", LinkRates(link=1e9, network=1e9), 1)
    print(machine_toml(machine))
    plan = PlannedStep(
        layout=Layout(),
        global_batch=options.batch,
        micro_batch=options.batch,
        precision="fp32",
    )
    figures = {}
    for name, make, image in (("ResNet-50", resnet50, False), ("U-Net", UNet, True)):
        build = partial(workload, make, edge=options.edge, batch=options.batch, image=image)
        predicted = compute_seconds(trace_step(build, plan).work, plan, machine)
        measured = measured_seconds(build(), options.batch, options.steps)
        figures[name] = {"predicted": predicted.total, "measured": measured}
        print(
            f"{name:12}measured {measured:8.3f} s, predicted {predicted.total:8.3f} s: convolutions "
            f"{predicted.convolutions:.3f}, memory {predicted.memory:.3f}, host {predicted.host:.3f}; "
            f"error {predicted.total / measured - 1:+.1%}",
            flush=True,
        )
        if options.operations:
            print_operations(build(), options.batch, plan, machine)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
