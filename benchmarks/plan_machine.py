"""Predicted and measured step times of convolutional networks on this machine.

    python benchmarks/plan_machine.py
    python benchmarks/plan_machine.py --steps 3 --edge 32 --batch 2      # a short try

It measures the machine as `shoal bench machine` does, traces one step of each network, and compares the
predicted time with the median of measured steps. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shoal

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.planned_models import Residual, UNet, classes, values
from shoal.bench.scaling.models import Workload
from shoal.distributed.layout import Layout
from shoal.plan.configuration import PlannedStep
from shoal.plan.layer_time import compute_seconds
from shoal.plan.measure import LinkRates, machine_toml, measure_machine
from shoal.plan.trace import trace_step


def resnet50() -> nn.Module:
    """Return a residual network with the bottlenecks of ResNet-50 (He et al. 2016)."""
    parts: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Residual(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


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
            f"{name:12}measured {measured:8.3f} s, predicted {predicted.total:8.3f} s: products "
            f"{predicted.products:.3f}, memory {predicted.memory:.3f}, host {predicted.host:.3f}; "
            f"error {predicted.total / measured - 1:+.1%}",
            flush=True,
        )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
