"""Stages on two processes by torch RPC, compared with one process and with torch's pipelining.

    python benchmarks/remote.py [--rounds 10] [--steps 1] [--json]

A deep stack of wide layers, compute bound, 8 micro-batches to a batch. Each process has one thread: one
process alone with the full model; `shoal.RPCPipeline` and `shoal.Pipeline` with half of the layers on
each of two; and torch's own ScheduleGPipe and Schedule1F1B over the same two stages, with the same
loss, clipping and AdamW by hand. A round runs each for the same number of steps, in a new random order,
while the others wait; speed-ups over the one process are within rounds.

The possible speed-up is measured too: both halves at once, without waiting or communication. It is the
value of two cores of this machine. With two stages and 8 micro-batches each idles for a ninth of the
time, while the pipeline fills and drains, so 8 / 9 of it is the maximum.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shoal
from spread import Spread, quartiles

WIDTH, LAYERS, MICRO_BATCHES, ROWS, CLASSES = 768, 12, 8, 512, 16
BATCH, SAMPLES = MICRO_BATCHES * ROWS, 4 * MICRO_BATCHES * ROWS
HALF = LAYERS // 2
AIM = 1.5
FULL = MICRO_BATCHES / (MICRO_BATCHES + 1)
ONE, APART = "one process", "halves, nothing sent"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        scores: Tensor = self.head(x)
        return scores


class Half(nn.Module):
    """The first or the last of the same layers."""

    def __init__(self, net: Net, *, last: bool) -> None:
        super().__init__()
        self.layers = net.layers[HALF:] if last else net.layers[:HALF]
        self.head = net.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        found: Tensor = self.head(x)
        return found


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % CLASSES


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def through_shoal(world: shoal.World, strategy: Any) -> Iterator[float]:
    torch.manual_seed(0)
    model = shoal.parallelize(Net(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=MICRO_BATCHES, shuffle=False)
    for batch in data.epochs(10**9):
        yield step(batch).loss


def alone() -> Iterator[float]:
    """Train all layers by hand in one process, on one of the ranks of the world."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    inputs, labels = dataset()
    while True:
        for first in range(0, SAMPLES, BATCH):
            total = 0.0
            for start in range(first, first + BATCH, ROWS):
                some = slice(start, start + ROWS)
                mean = F.cross_entropy(net(inputs[some]), labels[some]) / MICRO_BATCHES
                mean.backward()
                total += mean.item()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield total


def apart(world: shoal.World) -> Iterator[float]:
    """Train half of the layers on each of two processes, each with its own inputs."""
    half = Half(Net(), last=world.rank == 1)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4)
    inputs, labels = dataset()
    while True:
        for first in range(0, SAMPLES, BATCH):
            for start in range(first, first + BATCH, ROWS):
                some = slice(start, start + ROWS)
                output = half(inputs[some].requires_grad_())
                loss = F.cross_entropy(output, labels[some]) if world.rank else output.mean()
                (loss / MICRO_BATCHES).backward()
            nn.utils.clip_grad_norm_(half.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield 0.0


def by_hand(world: shoal.World, kind: type[Any]) -> Iterator[float]:
    """Train with torch's pipelining over two stages."""
    torch.manual_seed(0)
    half = Half(Net(), last=world.rank == 1)
    stage = PipelineStage(half, world.rank, 2, world.device, group=world.group)
    schedule = kind(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4)
    inputs, labels = dataset()
    while True:
        for first in range(0, SAMPLES, BATCH):
            some = slice(first, first + BATCH)
            losses: list[Tensor] = []
            if stage.is_first:
                schedule.step(inputs[some])
            else:
                schedule.step(target=labels[some], losses=losses, return_outputs=False)
            gradients = [p.grad for p in half.parameters() if p.grad is not None]
            sums = torch.stack((sum(g.square().sum() for g in gradients), torch.zeros(())))  # type: ignore[arg-type]
            if losses:
                sums[1] = torch.stack(losses).mean().detach()
            dist.all_reduce(sums)
            factor = float(torch.clamp(1.0 / (sums[0].sqrt() + 1e-6), max=1.0))
            for gradient in gradients:
                gradient.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
            yield float(sums[1])


def measure(world: shoal.World, rounds: int, steps: int) -> dict[str, Any]:
    halves = {
        "front": [f"layers.{number}" for number in range(HALF)],
        "back": [*(f"layers.{number}" for number in range(HALF, LAYERS)), "head"],
    }
    split = (f"layers.{HALF}",)
    makers: dict[str, Callable[[], Iterator[float]]] = {
        ONE: alone,
        "shoal.RPCPipeline": partial(through_shoal, world, shoal.RPCPipeline(stages=halves)),
        "shoal.Pipeline, 1f1b": partial(through_shoal, world, shoal.Pipeline(split_points=split)),
        "torch ScheduleGPipe": partial(by_hand, world, ScheduleGPipe),
        "torch Schedule1F1B": partial(by_hand, world, Schedule1F1B),
        APART: partial(apart, world),
    }
    loops = {name: make() for name, make in makers.items()}
    losses = {name: [next(loop) for _ in range(2)] for name, loop in loops.items()}
    _check(losses)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in random.Random(number).sample(list(loops), len(loops)):
            world.barrier()
            begun = time.perf_counter()
            if name != ONE or world.is_rank_zero:
                for _ in range(steps):
                    next(loops[name])
            world.barrier()
            times[name].append((time.perf_counter() - begun) / steps)
    return {
        name: {
            "seconds": statistics.median(own),
            "speedup": asdict(quartiles([a / b for a, b in zip(times[ONE], own, strict=True)])),
        }
        for name, own in times.items()
    }


def _check(losses: dict[str, list[float]]) -> None:
    """Check that all loops over the full model have the same losses, or their times mean nothing."""
    wanted = losses[ONE]
    for name, found in losses.items():
        if name != APART and any(
            abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, wanted, strict=True)
        ):
            raise SystemExit(f"{name} has the losses {found}, one process has {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        with shoal.init(layout="pipeline=2") as world:
            torch.set_num_threads(1)
            figures = measure(world, options.rounds, options.steps)
            if world.is_rank_zero:
                Path(options.inside).write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/figures.json"
        given = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--inside", path]
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", __file__, "--", *given]
        subprocess.run(command, check=True)
        figures = json.loads(Path(path).read_text())
    what = f"{LAYERS} layers of {WIDTH} x {WIDTH}, {MICRO_BATCHES} micro-batches of {ROWS} rows"
    print(f"\n{what}, one thread in each process")
    for name, own in figures.items():
        print(f"  {name:<22} {own['seconds'] * 1e3:8.1f} ms a step  {Spread(**own['speedup'])} x")
    most = FULL * figures[APART]["speedup"]["median"]
    print(f"  the maximum with {MICRO_BATCHES} micro-batches: {most:.3f} x")
    reached = figures["shoal.RPCPipeline"]["speedup"]["median"]
    print(f"  RPCPipeline's aim is {AIM} x: {'reached' if reached >= AIM else 'not reached'}")
    if options.json:
        print(json.dumps({"remote": figures}))


if __name__ == "__main__":
    main()
