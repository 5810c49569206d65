"""Stages on two processes by torch RPC, compared with one process and with torch's pipelining.

    python benchmarks/remote.py [--rounds 10] [--steps 1] [--json]

A deep stack of wide layers, compute bound, 8 micro-batches to a batch. Each process has one thread: one
process alone with the full model; `shoal.RPCPipeline` and `shoal.Pipeline` with half of the layers on
each of two; and torch's own ScheduleGPipe and Schedule1F1B over the same two stages, with the same
loss, clipping and AdamW by hand. While one of them runs, the others wait.

The possible speed-up is measured too: both halves at once, without waiting or communication. It is the
value of two cores of this machine. With two stages and 8 micro-batches each idles for a ninth of the
time, while the pipeline fills and drains, so 8 / 9 of it is the maximum. RPCPipeline's aim is 1.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show, timed
from loops import adamw, labelled, loss

LAYERS, MICRO_BATCHES, CLASSES = 12, 8, 16
HALF = LAYERS // 2
AIM = 1.5
FULL = MICRO_BATCHES / (MICRO_BATCHES + 1)
ONE, APART = "one process", "halves, nothing sent"


class Net(nn.Module):
    """All layers, or the first or the second half of them."""

    def __init__(self, width: int, half: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers, head = (
            nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS)),
            nn.Linear(width, CLASSES),
        )
        self.layers = layers if half is None else layers[HALF:] if half else layers[:HALF]
        self.head = nn.Identity() if half == 0 else head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        scores: Tensor = self.head(x)
        return scores


class Loops:
    """The loops of a rank, whose iterations return the loss of the step."""

    def __init__(self, world: shoal.World, given: argparse.Namespace) -> None:
        self.world, self.width, self.rows = world, given.width, given.rows
        self.batch = MICRO_BATCHES * given.rows
        self.data = labelled(4 * self.batch, given.width, CLASSES)

    def batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield the micro-batches of each batch, in order."""
        while True:
            for pair in zip(*(column.split(self.batch) for column in self.data), strict=True):
                yield list(zip(*(column.split(self.rows) for column in pair), strict=True))

    def shoal(self, strategy: Any) -> Iterator[float]:
        model = shoal.parallelize(Net(self.width), self.world, strategy)
        step = shoal.Step(model, adamw(model.parameters()), shoal.Task(loss), clip=1.0)
        options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "shuffle": False}
        for batch in shoal.Loader(self.data, self.world, batch_size=self.batch, **options).epochs(
            10**9
        ):
            yield step(batch).loss

    def alone(self, half: int | None = None) -> Iterator[float]:
        """Train by hand in one process: all layers, or a half with its own inputs."""
        net = Net(self.width, half)
        optimizer = adamw(net.parameters())
        for batch in self.batches():
            total = 0.0
            for inputs, labels in batch:
                output = net(inputs if half is None else inputs.requires_grad_())
                mean = output.mean() if half == 0 else F.cross_entropy(output, labels)
                (mean / MICRO_BATCHES).backward()
                total += mean.item() / MICRO_BATCHES
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield total

    def torch(self, kind: type[Any]) -> Iterator[float]:
        """Train with torch's pipelining over two stages."""
        half = Net(self.width, self.world.rank)
        stage = PipelineStage(half, self.world.rank, 2, self.world.device, group=self.world.group)
        schedule = kind(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
        optimizer = adamw(half.parameters())
        for batch in self.batches():
            inputs, labels = map(torch.cat, zip(*batch, strict=True))
            losses: list[Tensor] = []
            if stage.is_first:
                schedule.step(inputs)
            else:
                schedule.step(target=labels, losses=losses, return_outputs=False)
            gradients = [p.grad for p in half.parameters() if p.grad is not None]
            sums = torch.zeros(2)
            sums[0] = sum(g.square().sum() for g in gradients)
            if losses:
                sums[1] = torch.stack(losses).mean().detach()
            dist.all_reduce(sums)
            factor = float(torch.clamp(1.0 / (sums[0].sqrt() + 1e-6), max=1.0))
            for gradient in gradients:
                gradient.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
            yield float(sums[1])


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop in each round."""
    halves = {
        "front": [f"layers.{number}" for number in range(HALF)],
        "back": [*(f"layers.{number}" for number in range(HALF, LAYERS)), "head"],
    }
    with shoal.init(layout="pipeline=2") as world:
        torch.set_num_threads(1)
        made = Loops(world, given)
        loops = {
            ONE: made.alone(),
            "shoal.RPCPipeline": made.shoal(shoal.RPCPipeline(stages=halves)),
            "shoal.Pipeline, 1f1b": made.shoal(shoal.Pipeline(split_points=(f"layers.{HALF}",))),
            "torch ScheduleGPipe": made.torch(ScheduleGPipe),
            "torch Schedule1F1B": made.torch(Schedule1F1B),
            APART: made.alone(world.rank),
        }
        _check({name: [next(loop) for _ in range(2)] for name, loop in loops.items()})

        def turn(name: str) -> float:
            here = name != ONE or world.is_rank_zero
            return timed(world, loops[name].__next__ if here else int, given.steps)

        return alternate({name: partial(turn, name) for name in loops}, given.rounds)


def _check(losses: dict[str, list[float]]) -> None:
    """Check that all loops over the full model have the same losses, or their times mean nothing."""
    wanted = losses[ONE]
    for name, found in losses.items():
        if name != APART and any(
            abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, wanted, strict=True)
        ):
            raise SystemExit(f"{name} has the losses {found}, one process has {wanted}")


def main() -> None:
    given = parse(__doc__, width=768, rows=512, rounds=10, steps=1)
    times = shoal.launch(measure, given, processes=2)[0]
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "ms per step": quartiles([1e3 * each for each in own]),
            "speed-up": quartiles(ratios(times[ONE], own)),
        }
        for name, own in times.items()
    ]
    what = f"{LAYERS} layers of {given.width}, {MICRO_BATCHES} micro-batches of {given.rows} rows"
    show(f"{what}, one thread in each process, {machine()}", rows)
    speed = {row["way"]: row["speed-up"].median for row in rows}
    print(f"the maximum with {MICRO_BATCHES} micro-batches: {FULL * speed[APART]:.3f} x")
    reached = "reached" if speed["shoal.RPCPipeline"] >= AIM else "not reached"
    print(f"RPCPipeline's aim is {AIM} x: {reached}")
    finish(given, {"remote": rows})


if __name__ == "__main__":
    main()
