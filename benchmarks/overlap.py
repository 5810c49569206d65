"""Training over a low-bandwidth link: step times of Shoal and plain torch, and their overlap.

    python benchmarks/overlap.py [--rates 1gbit 200mbit] [--strategies ddp compiled fsdp]
        [--models linear gpt2] [--rounds 8] [--steps 6] [--json]

Two nodes, each a network namespace with one rank and one core (see nodes.py). The models are ten linear
layers of width 1024, and transformers' GPT-2 with six layers of width 256. `plain` is the loop of
PyTorch's tutorials with gradient clipping and AdamW: DistributedDataParallel (`ddp`), the same under
torch.compile (`compiled`), or `fully_shard` on each block and on the model (`fsdp`). Shoal takes the
same batches through `Step`.

A round runs each loop for some steps, in an order that rotates; ratios are taken within a round. Two
more measurements in each round separate computing from communication: the plain loop without a wrapper,
and the collectives of the same sizes alone. The hidden fraction of communication is
1 - (step - compute) / communication.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nodes
import shoal
from spread import Spread, quartiles

WIDTH, LAYERS, ROWS = 1024, 10, 256
WORDS, CONTEXT, SEQUENCES = 4096, 64, 16
WARM_UP = 3
"""Steps of each loop before the first round: plain DDP rebuilds its buckets in the first."""


class Causal(nn.Module):
    """GPT-2 as transformers has it, logits only."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=WORDS,
            n_positions=CONTEXT,
            n_embd=256,
            n_layer=6,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.net = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens).logits
        return logits


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        return Causal()
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*layers)


def samples(name: str) -> tuple[tuple[Tensor, ...], int]:
    """Return the dataset's tensors, the same on all ranks, and the global batch size."""
    generator = torch.Generator().manual_seed(0)
    if name == "gpt2":
        tokens = torch.randint(0, WORDS, (SEQUENCES * 16, CONTEXT + 1), generator=generator)
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), SEQUENCES
    inputs = torch.randn(ROWS * 4, WIDTH, generator=generator)
    return (inputs, torch.randint(0, WIDTH, (ROWS * 4,), generator=generator)), ROWS


def total(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="sum")


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, which FSDP gathers one by one."""
    return list(model.net.transformer.h if isinstance(model, Causal) else model.children())


def wrapped(name: str, strategy: str) -> nn.Module:
    """Return the model as the documentation of torch wraps it; `none` without communication."""
    model = build(name)
    if strategy == "fsdp":
        for block in blocks(model):
            if any(True for _ in block.parameters()):
                fully_shard(block)
        fully_shard(model)
        return model
    if strategy != "none":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def plain(world: shoal.World, name: str, strategy: str, *, compiled: bool) -> Iterator[None]:
    """Train with the loop of PyTorch's tutorials."""
    tensors, batch = samples(name)
    model = wrapped(name, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward: Any = torch.compile(model) if compiled else model
    dataset = TensorDataset(*tensors)
    sampler: Any = DistributedSampler(dataset, world.size, world.rank)
    loader = DataLoader(dataset, batch // world.size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            (total(forward(inputs), labels) / labels.numel()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1


def through_shoal(world: shoal.World, name: str, strategy: str) -> Iterator[None]:
    """Train the same through Loader and Step."""
    tensors, batch = samples(name)
    data = shoal.Loader(tensors, world, batch_size=batch)
    model = shoal.parallelize(build(name), world, shoal.FSDP() if strategy == "fsdp" else shoal.DDP())
    task = shoal.Task(lambda output, batch: (total(output, batch[1]), batch[1].numel()), inputs=first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compiler = "inductor" if strategy == "compiled" else None
    step = shoal.Step(model, optimizer, task, clip=1.0, compile=compiler)
    for each in data.epochs(10**6):
        step(each)
        yield


def first(batch: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (batch[0],)


def communication(world: shoal.World, name: str, strategy: str) -> Iterator[None]:
    """Communicate as many bytes as a step of torch does, without computing."""
    model = build(name)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    whole = sum(p.numel() for p in model.parameters())
    if strategy == "fsdp":
        units = [size for size in sizes if size]
        rest = whole - sum(units)  # the root stays gathered between forward and backward
        gathers = [*units, *units, rest] if rest else [*units, *units]
        scatters = [*units, rest] if rest else units
        full = torch.zeros(max(gathers) + world.size)
        part = torch.zeros(len(full) // world.size)
        while True:
            for size in gathers:
                each = -(-size // world.size)
                dist.all_gather_into_tensor(full[: each * world.size], part[:each])
            for size in scatters:
                each = -(-size // world.size)
                dist.reduce_scatter_tensor(part[:each], full[: each * world.size])
            yield
    buckets = []
    size = (1 << 20) // 4  # DDP's first bucket; those after it have 25 MiB
    while whole > 0:
        buckets.append(torch.zeros(min(size, whole)))
        whole -= size
        size = (25 << 20) // 4
    while True:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        yield


def measure(name: str, strategy: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each loop in each round, on every rank."""
    compiled = strategy == "compiled"
    loops: dict[str, Callable[[shoal.World], Iterator[None]]] = {
        "plain": lambda world: plain(world, name, strategy, compiled=compiled),
        "shoal": lambda world: through_shoal(world, name, strategy),
        "compute": lambda world: plain(world, name, "none", compiled=compiled),
        "communication": lambda world: communication(world, name, strategy),
    }
    layout = "shard=-1" if strategy == "fsdp" else "replicate=-1"
    with shoal.init(seed=0, layout=layout) as world:
        running = {each: make(world) for each, make in loops.items()}
        times: dict[str, list[float]] = {each: [] for each in loops}
        for loop in running.values():
            for _ in range(WARM_UP):
                next(loop)
        names = list(loops)
        for number in range(rounds):
            turn = number % len(names)
            for each in names[turn:] + names[:turn]:
                world.barrier()
                begun = time.perf_counter()
                for _ in range(steps):
                    next(running[each])
                times[each].append((time.perf_counter() - begun) / steps * 1e3)
        return times if world.is_rank_zero else {}


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    def hidden(loop: str) -> Spread:
        rows = zip(times[loop], times["compute"], times["communication"], strict=True)
        return quartiles([1 - (step - compute) / wire for step, compute, wire in rows])

    ratios = [ours / theirs for ours, theirs in zip(times["shoal"], times["plain"], strict=True)]
    return {
        "milliseconds": {loop: statistics.median(values) for loop, values in times.items()},
        "shoal / plain": asdict(quartiles(ratios)),
        "hidden": {loop: asdict(hidden(loop)) for loop in ("plain", "shoal")},
    }


def show(title: str, found: dict[str, Any]) -> None:
    times = ", ".join(f"{loop} {value:.0f} ms" for loop, value in found["milliseconds"].items())
    shares = ", ".join(f"{loop} {Spread(**share)}" for loop, share in found["hidden"].items())
    print(f"{title}: {times}\n  shoal / plain {Spread(**found['shoal / plain'])}")
    print(f"  hidden fraction of communication: {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--models", nargs="+", default=["linear", "gpt2"], choices=["linear", "gpt2"])
    parser.add_argument("--strategies", nargs="+", default=["ddp"], choices=["ddp", "compiled", "fsdp"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.results is not None:
        times = measure(given.models[0], given.strategies[0], given.rounds, given.steps)
        if times:
            given.results.write_text(json.dumps(times))
        return
    figures = {}
    with nodes.started(2) as cluster, tempfile.TemporaryDirectory() as folder:
        for rate in given.rates:
            nodes.limit(cluster, rate)
            for name, strategy in itertools.product(given.models, given.strategies):
                results = Path(folder) / f"{name}-{strategy}-{rate}"
                counts = ["--rounds", str(given.rounds), "--steps", str(given.steps)]
                which = ["--models", name, "--strategies", strategy]
                nodes.run_ranks(cluster, __file__, [*which, *counts, "--results", str(results)])
                title = f"{name} {strategy} {rate}"
                figures[title] = found = summarise(json.loads(results.read_text()))
                show(title, found)
    if given.json:
        print(json.dumps({"overlap": figures}))


if __name__ == "__main__":
    main()
