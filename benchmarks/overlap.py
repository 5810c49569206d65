"""Training over a low-bandwidth link: step times of Shoal and plain torch, and their overlap.

    python benchmarks/overlap.py [--rates 1gbit 200mbit] [--strategies ddp compiled fsdp]
        [--models linear gpt2] [--rounds 8] [--steps 6] [--json]

Two nodes, each a network namespace with one rank and one core (see cluster.py). The models are ten
linear layers of width 1024, and transformers' GPT-2 with six layers of width 256. `plain` is the loop
of PyTorch's tutorials with gradient clipping and AdamW: DistributedDataParallel (`ddp`), the same under
torch.compile (`compiled`), or `fully_shard` on each block and on the model (`fsdp`). Shoal takes the
same batches through `Step`.

Two more measurements in each round separate computing from communication: the plain loop without a
wrapper, and the collectives of the same sizes alone. The hidden fraction of communication is
1 - (step - compute) / communication.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cluster
import shoal
from harness import finish, machine, parse, quartiles, show, time_rows, time_steps
from loops import adamw, labelled, sampled, sequences, stack, through_shoal, train, wrapped

WIDTH, LAYERS, ROWS = 1024, 10, 256
WORDS, CONTEXT, SEQUENCES = 4096, 64, 16
WARM_UP = 3
"""Steps of each loop before the first round: plain DDP rebuilds its buckets in the first."""


class Causal(nn.Module):
    """GPT-2 as transformers has it, logits only."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"vocab_size": WORDS, "n_positions": CONTEXT, "n_embd": 256, "n_layer": 6, "n_head": 4}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.net = GPT2LMHeadModel(GPT2Config(**shape, **dropout, use_cache=False))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens).logits
        return logits


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Causal() if name == "gpt2" else stack(WIDTH, LAYERS)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, which FSDP gathers one by one."""
    found = model.net.transformer.h if isinstance(model, Causal) else model.children()
    return [block for block in found if any(True for _ in block.parameters())]


def plain(world: shoal.World, name: str, strategy: str, data: Any, batch: int) -> Iterator[None]:
    """Train as the documentation of torch wraps the model; `none` without communication."""
    model = build(name)
    if strategy == "fsdp":
        for block in blocks(model):
            fully_shard(block)
        fully_shard(model)
    elif not strategy.startswith("none"):
        model = wrapped(model, world)
    call: Any = torch.compile(model) if strategy.endswith("compiled") else model
    return train(call, sampled(world, data, batch), adamw(model.parameters()), clip=1.0)


def communication(world: shoal.World, name: str, strategy: str) -> Iterator[None]:
    """Communicate as many bytes as a step of torch does, without computing."""
    model = build(name)
    whole = sum(p.numel() for p in model.parameters())
    if strategy == "fsdp":
        units = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
        rest = [whole - sum(units)] if whole > sum(units) else []
        full = torch.zeros(max(*units, *rest) + world.size)
        part = torch.zeros(len(full) // world.size)
        while True:
            for size in [*units, *units, *rest]:  # the root stays gathered between the passes
                each = -(-size // world.size)
                dist.all_gather_into_tensor(full[: each * world.size], part[:each])
            for size in [*units, *rest]:
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


def measure(name: str, strategy: str, rounds: int, steps: int, results: Path) -> None:
    """Measure on this rank; rank 0 writes the seconds of a step of each loop in each round."""
    gpt = name == "gpt2"
    batch = SEQUENCES if gpt else ROWS
    data = sequences(16 * batch, CONTEXT, WORDS) if gpt else labelled(4 * batch, WIDTH, WIDTH)
    compiled = strategy == "compiled"
    sharded = strategy == "fsdp"
    with shoal.init(seed=0, layout="shard=-1" if sharded else "replicate=-1") as world:
        ours = through_shoal(
            world,
            build(name),
            data,
            batch,
            strategy=shoal.FSDP() if sharded else shoal.DDP(),
            clip=1.0,
            compiled="inductor" if compiled else None,
        )
        alone = "none compiled" if compiled else "none"
        loops: dict[str, Iterator[Any]] = {
            "plain": plain(world, name, strategy, data, batch),
            "shoal": ours,
            "compute": plain(world, name, alone, data, batch),
            "communication": communication(world, name, strategy),
        }
        times = time_steps(
            world,
            {each: loop.__next__ for each, loop in loops.items()},
            rounds=rounds,
            steps=steps,
            warm_up=WARM_UP,
        )
        if world.is_rank_zero:
            results.write_text(json.dumps(times))


def rows_of(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the times, and the hidden fraction of communication."""
    rows = time_rows(times, "plain")
    for row in rows[:2]:
        three = zip(times[row["loop"]], times["compute"], times["communication"], strict=True)
        row["hidden"] = quartiles([1 - (step - compute) / wire for step, compute, wire in three])
    return rows


def main() -> None:
    lists = {"rates": ["1gbit", "200mbit"], "models": ["linear", "gpt2"], "strategies": ["ddp"]}
    given = parse(__doc__, **lists, rounds=8, steps=6, results=Path)
    if given.results is not None:  # on a rank
        measure(given.models[0], given.strategies[0], given.rounds, given.steps, given.results)
        return
    figures = {}
    with cluster.started(2) as nodes, tempfile.TemporaryDirectory() as folder:
        for rate, name, strategy in itertools.product(given.rates, given.models, given.strategies):
            cluster.limit(nodes, rate)
            results = Path(folder) / f"{name}-{strategy}-{rate}"
            options = ["--models", name, "--strategies", strategy, "--results", str(results)]
            options += ["--rounds", str(given.rounds), "--steps", str(given.steps)]
            cluster.run_ranks(nodes, __file__, options)
            figures[f"{name} {strategy} {rate}"] = rows = rows_of(json.loads(results.read_text()))
            show(f"{name} {strategy} {rate}, {machine()}", rows)
    finish(given, {"overlap": figures})


if __name__ == "__main__":
    main()
