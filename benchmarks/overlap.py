"""DDP over a low-bandwidth link: step times of Shoal and plain DDP, and their hidden communication.

    python benchmarks/overlap.py [--rates 1gbit 200mbit] [--rounds 8] [--steps 6] [--json]

Two nodes, each a network namespace with one rank and one core (see nodes.py). The models are ten linear
layers of width 1024, and transformers' GPT-2 with six layers of width 256. `plain` is the loop of
PyTorch's DDP tutorial with gradient clipping and AdamW; Shoal takes the same batches through `Step`.

A round runs each loop for some steps, in an order that rotates; ratios are taken within a round. Two
more measurements in each round separate computing from communication: the plain loop under `no_sync`,
and the all-reduce of the same gradients alone. The hidden fraction of communication is
1 - (step - compute) / communication.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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


def plain(world: shoal.World, name: str, *, synchronise: bool = True) -> Iterator[None]:
    """Train with the loop of PyTorch's tutorials."""
    tensors, batch = samples(name)
    model = nn.parallel.DistributedDataParallel(build(name), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dataset = TensorDataset(*tensors)
    sampler: Any = DistributedSampler(dataset, world.size, world.rank)
    loader = DataLoader(dataset, batch // world.size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            with nullcontext() if synchronise else model.no_sync():
                (total(model(inputs), labels) / labels.numel()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1


def through_shoal(world: shoal.World, name: str) -> Iterator[None]:
    """Train the same through Loader and Step."""
    tensors, batch = samples(name)
    data = shoal.Loader(tensors, world, batch_size=batch)
    model = shoal.parallelize(build(name), world, shoal.DDP())
    task = shoal.Task(lambda output, batch: (total(output, batch[1]), batch[1].numel()), inputs=first)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), task, clip=1.0)
    for each in data.epochs(10**6):
        step(each)
        yield


def first(batch: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (batch[0],)


def communication(world: shoal.World, name: str) -> Iterator[None]:
    """All-reduce as many bytes as the gradients have, in buckets of DDP's size."""
    left = sum(parameter.numel() for parameter in build(name).parameters())
    buckets = []
    size = (1 << 20) // 4  # DDP's first bucket; those after it have 25 MiB
    while left > 0:
        buckets.append(torch.zeros(min(size, left)))
        left -= size
        size = (25 << 20) // 4
    while True:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        yield


def measure(name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each loop in each round, on every rank."""
    loops: dict[str, Callable[[shoal.World, str], Iterator[None]]] = {
        "plain": plain,
        "shoal": through_shoal,
        "compute": lambda world, name: plain(world, name, synchronise=False),
        "communication": communication,
    }
    with shoal.init(seed=0) as world:
        running = {each: make(world, name) for each, make in loops.items()}
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
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.results is not None:
        times = measure(given.models[0], given.rounds, given.steps)
        if times:
            given.results.write_text(json.dumps(times))
        return
    figures = {}
    with nodes.started(2) as cluster, tempfile.TemporaryDirectory() as folder:
        for rate in given.rates:
            nodes.limit(cluster, rate)
            for name in given.models:
                results = Path(folder) / f"{name}-{rate}"
                counts = ["--rounds", str(given.rounds), "--steps", str(given.steps)]
                arguments = ["--models", name, *counts, "--results", str(results)]
                nodes.run_ranks(cluster, __file__, arguments)
                figures[f"{name} {rate}"] = found = summarise(json.loads(results.read_text()))
                show(f"{name} at {rate}", found)
    if given.json:
        print(json.dumps({"overlap": figures}))


if __name__ == "__main__":
    main()
