"""What spreading a model costs in Shoal, beside hand-written torch, interleaved in one run.

    python benchmarks/parallel.py [--rounds 20] [--steps 20] [--json]

A small transformer on 2 processes: DDP, FSDP2 and tensor parallelism, each as a torch loop (forward,
backward, clip, AdamW, zero_grad, and the all-reduce that makes the loss global) and as a Shoal Step.
A round runs both for the same number of steps, in an order that changes; ratios are within rounds.
Elements sent are counted by torch's profiler, which records each of Gloo's collectives with its shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import shoal

WIDTH, LAYERS, LENGTH, VOCABULARY, BATCH, SAMPLES = 128, 4, 32, 256, 16, 512
LAYOUTS = {"DDP": "replicate=2", "FSDP": "shard=2", "Tensor": "tensor=2"}
PLAN = {"blocks.*.linear1": "column", "blocks.*.linear2": "row"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def dataset() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


def by_hand(world: shoal.World, way: str) -> Iterator[None]:
    """As torch's own tutorials spread a model."""
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    elif way == "FSDP":
        mesh = world.mesh["shard"]
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        styles: dict[str, Any] = {}
        for number in range(LAYERS):
            styles[f"blocks.{number}.linear1"] = ColwiseParallel()
            styles[f"blocks.{number}.linear2"] = RowwiseParallel()
        parallelize_module(net, world.mesh["tensor"], styles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = dataset()
    share = BATCH // world.data_size
    start = world.data_rank * share
    while True:
        for first in range(0, SAMPLES, BATCH):
            mine = slice(first + start, first + start + share)
            output = model(tokens[mine])
            loss = F.cross_entropy(output.flatten(0, 1), labels[mine].flatten())
            loss.backward()
            if way == "Tensor":
                _clip_over_ranks(net)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world.data_size > 1:
                sums = torch.stack((loss.detach() * share, torch.tensor(float(share))))
                dist.all_reduce(sums)
            yield


def _clip_over_ranks(net: nn.Module) -> None:
    """clip_grad_norm_ refuses parameters of which some are divided and some are not."""
    own = torch.zeros(())
    for parameter in net.parameters():
        gradient = parameter.grad
        if gradient is not None:
            divided = isinstance(gradient, DTensor)
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            own = own + local.square().sum() / (1 if divided else dist.get_world_size())
    dist.all_reduce(own)
    factor = torch.clamp(1.0 / (own.sqrt() + 1e-6), max=1.0)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The same loss as a sum and a count."""
    tokens = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return tokens / LENGTH, len(batch[1])


def through_shoal(world: shoal.World, way: str) -> Iterator[None]:
    strategies: dict[str, Any] = {
        "DDP": shoal.DDP(),
        "FSDP": shoal.FSDP(),
        "Tensor": shoal.Tensor(plan=PLAN),
    }
    torch.manual_seed(0)
    model = shoal.parallelize(Net(), world, strategies[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = shoal.Loader(dataset(), world, batch_size=BATCH)
    for batch in data.epochs(10**9):
        step(batch)
        yield


def elements(loop: Iterator[None], steps: int) -> dict[str, float]:
    """Elements in each kind of collective, per step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        consume(loop, steps)
    sent: dict[str, float] = {}
    for event in recorded.events() or ():
        if event.name.startswith("gloo:"):
            count = sum(math.prod(shape) for shape in event.input_shapes if shape)
            name = event.name.removeprefix("gloo:")
            sent[name] = sent.get(name, 0.0) + count / steps
    return sent


def consume(loop: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(loop)


def measure(world: shoal.World, way: str, rounds: int, steps: int) -> dict[str, Any]:
    makers: dict[str, Callable[..., Iterator[None]]] = {"torch": by_hand, "shoal": through_shoal}
    loops = {who: make(world, way) for who, make in makers.items()}
    for loop in loops.values():
        consume(loop, 5)
    times: dict[str, list[float]] = {who: [] for who in loops}
    for number in range(rounds):
        for who in sorted(loops, reverse=bool(number % 2)):
            world.barrier()
            begun = time.perf_counter()
            consume(loops[who], steps)
            times[who].append((time.perf_counter() - begun) / steps * 1e3)
    pairs = [ours / theirs for ours, theirs in zip(times["shoal"], times["torch"], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    return {
        "way": way,
        "milliseconds": {who: statistics.median(values) for who, values in times.items()},
        "ratio": {"low": low, "median": middle, "high": high},
        "elements": {who: elements(loop, 4) for who, loop in loops.items()},
    }


def show(figures: dict[str, Any]) -> None:
    ratio = figures["ratio"]
    print(f"\n{figures['way']}, 2 processes")
    for who, value in figures["milliseconds"].items():
        sent = ", ".join(f"{n} {c:,.0f}" for n, c in sorted(figures["elements"][who].items()))
        print(f"  {who:<6} {value:7.2f} ms a step; elements: {sent}")
    print(f"  ratio  {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        way, path = options.inside
        with shoal.init(layout=LAYOUTS[way]) as world:
            figures = measure(world, way, options.rounds, options.steps)
            if world.first:
                Path(path).write_text(json.dumps(figures))
        return
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for way in LAYOUTS:
            path = f"{directory}/{way}.json"
            given = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            command = [sys.executable, "-m", "shoal", "run", "-n", "2", __file__, "--", *given]
            subprocess.run([*command, "--inside", way, path], check=True)
            found.append(json.loads(Path(path).read_text()))
    for each in found:
        show(each)
    if options.json:
        print(json.dumps({"parallel": found}))


if __name__ == "__main__":
    main()
