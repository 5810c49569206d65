"""Predicted and measured step times of convolutional networks on this machine.

    python benchmarks/plan_machine.py
    python benchmarks/plan_machine.py --steps 3 --edge 32 --batch 2      # a short try

It measures the machine as `shoal bench machine` does, traces one step of each network, and compares the
predicted time with the median of measured steps. The machine must be idle.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import shoal
from harness import finish, parse, show, time_steps
from harness import machine as here
from helpers.planned_models import UNet, classes, values
from loops import through_shoal
from resnet import network
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.measure import LinkRates, machine_toml, measure_machine
from shoal.tools.plan.time.rates import compute_seconds
from shoal.tools.plan.trace import trace_step
from shoal.tools.plan.work.planned_step import PlannedStep


def workload(make: Callable[[], nn.Module], *, edge: int, batch: int, image: bool) -> Workload:
    """Return a network with images of `edge` pixels, which it classifies or reproduces."""
    pixels = torch.randn(batch, 3, edge, edge)
    targets = pixels.clone() if image else torch.arange(batch) % 10
    return Workload(make, shoal.Task(values if image else classes), (pixels, targets))


def measured_seconds(built: Workload, batch: int, steps: int) -> float:
    """Return the median of the seconds of steps, after two that warm up."""
    with shoal.init(device="cpu") as world:
        loop = through_shoal(
            world, built.model, built.dataset, batch, optimizer=torch.optim.AdamW, task=built.task
        )
        times = time_steps(world, {"": loop.__next__}, rounds=steps, steps=1, warm_up=2)
    return statistics.median(times[""])


def main() -> None:
    given = parse(__doc__, batch=8, edge=128, steps=20)
    machine = measure_machine("here", LinkRates(link=1e9, network=1e9), 1)
    print(machine_toml(machine))
    plan = PlannedStep(
        layout=Layout(), global_batch=given.batch, micro_batch=given.batch, precision="fp32"
    )
    rows = []
    for name, make, image in (("ResNet-50", partial(network, 50, 64), False), ("U-Net", UNet, True)):
        build = partial(workload, make, edge=given.edge, batch=given.batch, image=image)
        predicted = compute_seconds(trace_step(build, plan).work, plan, machine)
        measured = measured_seconds(build(), given.batch, given.steps)
        rows.append(
            {
                "network": name,
                "measured, s": measured,
                "predicted, s": predicted.total,
                "error": f"{predicted.total / measured - 1:+.1%}",
                "convolutions": predicted.convolutions,
                "memory": predicted.memory,
                "host": predicted.host,
            }
        )
    show(f"{given.batch} images of {given.edge} px, {here()}", rows)
    finish(given, {"plan_machine": rows})


if __name__ == "__main__":
    main()
