"""Training over a low-bandwidth link: time, bytes and loss of compression, and overlap without it.

    python benchmarks/network.py --what methods [--nodes 2 4] [--rates 200mbit 1gbit none] [--rounds 6]
    python benchmarks/network.py --what overlap [--rates 1gbit 200mbit] [--models linear gpt2]
        [--strategies ddp compiled fsdp] [--rounds 6] [--steps 6] [--json]

Starts a Slurm cluster on this machine (see cluster.py): a network namespace and a link for each node.

methods: in one job, each strategy trains a model of 2.4 million parameters on the outputs of a random
network. The baseline is plain DDP, the loop of PyTorch's tutorial. Bytes are those that the kernel
counted on the first node's interface. The loss is that of held-out samples: after equal steps, and
after the time that plain DDP took for half of them. Then each strategy continues alone until it reaches
the final loss of plain DDP, or has taken as long: "times sooner" is the ratio of the two times. Aims:
at 200 Mbit/s a strategy that takes a third of plain DDP's time to the same loss; "auto" within 5 % of
the best; on a link without a limit never slower than plain DDP.

overlap: step times on two nodes with one core each. The models are ten linear layers of width 1024, and
transformers' GPT-2 with six layers of width 256. "plain" is the loop of PyTorch's tutorials with
gradient clipping and AdamW: DistributedDataParallel (`ddp`), the same under torch.compile (`compiled`),
or `fully_shard` on each block and on the model (`fsdp`). Shoal takes the same batches through `Step`.
Two more measurements in each round separate computing from communication: the plain loop without a
wrapper, and the collectives of the same sizes alone. The hidden fraction of communication is
1 - (step - compute) / communication.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cluster
import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show, time_rows, time_steps
from loops import adamw, by_hand, labelled, sampled, sequences, stack, through_shoal, train, wrapped

INPUTS, HIDDEN, CLASSES = 256, 1400, 64
SAMPLES, HELD_OUT, BATCH = 65_536, 2048, 128
STEPS = 8
"""Steps of a method in a round."""
UNCOUNTED = 2
"""Rounds that train but are not timed: PowerSGD sends full gradients during them."""
PLAIN = "plain DDP"
METHODS: dict[str, Any] = {
    PLAIN: None,
    "shoal.DDP": shoal.DDP(),
    "fp16": shoal.DDP(compression="fp16"),
    "bf16": shoal.DDP(compression="bf16"),
    "int8": shoal.DDP(compression="int8"),
    "PowerSGD": shoal.DDP(compression=shoal.PowerSGD()),
    "TopK": shoal.DDP(compression=shoal.TopK(ratio=0.01)),
    "auto": shoal.DDP(compression="auto"),
    "LocalSGD": shoal.LocalSGD(sync_every=8),
    "DiLoCo": shoal.DiLoCo(sync_every=24),
}
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
WIDTH, LAYERS, ROWS = 1024, 10, 256
WORDS, CONTEXT, SEQUENCES = 4096, 64, 16
WARM_UP = 3
"""Steps of each loop before the first round: plain DDP rebuilds its buckets in the first."""


def network(seed: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(INPUTS, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, CLASSES))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def lesson() -> tuple[Tensor, Tensor]:
    """Return inputs, and the teacher's outputs for them."""
    teacher = network(1, 64)
    inputs = torch.randn(SAMPLES + HELD_OUT, INPUTS, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


class Contender:
    """A method or plain DDP, its model, and its measurements."""

    def __init__(self, world: shoal.World, name: str, data: tuple[Tensor, Tensor]) -> None:
        self.model = network(3, HIDDEN)
        options: dict[str, Any] = {"clip": 1.0}
        options["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
        training = (data[0][:SAMPLES], data[1][:SAMPLES])
        self.steps: Any = (
            by_hand(world, self.model, training, BATCH, **options)
            if name == PLAIN
            else through_shoal(world, self.model, training, BATCH, strategy=METHODS[name], **options)
        )
        self.held_out = (data[0][SAMPLES:], data[1][SAMPLES:])
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.losses: list[float] = []
        self.world = world

    def round(self) -> None:
        self.world.barrier()
        sent, begun = int(COUNTER.read_text()), time.perf_counter()
        for _ in range(STEPS):
            next(self.steps)
        self.world.barrier()
        self.seconds.append(time.perf_counter() - begun)
        self.bytes.append(int(COUNTER.read_text()) - sent)
        with torch.no_grad():  # this rank's parameters, which may differ from those of others
            inputs, labels = self.held_out
            self.losses.append(float(F.cross_entropy(self.model(inputs), labels)))

    def behind(self, other: Contender) -> bool:
        """Return whether it has a larger loss than the other, and has taken less time."""
        later = self.losses[-1] > other.losses[-1]
        return later and sum(self.seconds[UNCOUNTED:]) < sum(other.seconds[UNCOUNTED:])


def train_methods(world: shoal.World, given: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, bytes and losses of each method on this rank. Collective."""
    data = lesson()
    ways = {name: Contender(world, name, data) for name in METHODS}
    alternate({name: way.round for name, way in ways.items()}, given.rounds, uncounted=UNCOUNTED)
    for way in ways.values():
        while world.broadcast(way.behind(ways[PLAIN])):
            way.round()
    return {name: [way.seconds, way.bytes, way.losses] for name, way in ways.items()}


def method_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each method seconds and bytes of a step, its ratio to plain DDP, and the losses."""
    base, _, plain_losses = found[PLAIN]
    rounds, whole, wanted = len(base), sum(base[UNCOUNTED:]), plain_losses[-1]
    rows = []
    for name, (times, sent, all_losses) in found.items():
        seconds, counted = times[UNCOUNTED:rounds], sent[UNCOUNTED:rounds]
        losses = all_losses[UNCOUNTED - 1 :]
        at = [sum(times[UNCOUNTED : UNCOUNTED + n]) for n in range(len(losses))]
        # The first measurement with that loss, and the one before it, between which it is reached.
        first = next((number for number, loss in enumerate(losses) if loss <= wanted), None)
        pair = slice(max(0, (first or 0) - 1), (first or 0) + 1)
        reached = float(np.interp(-wanted, [-loss for loss in losses[pair]], at[pair]))
        rows.append(
            {
                "method": name,
                "s per step": quartiles([each / STEPS for each in seconds]),
                "MB per step": sum(counted) / len(counted) / STEPS / 1e6,
                f"/ {PLAIN}": quartiles(ratios(seconds, base[UNCOUNTED:])),
                "loss": all_losses[rounds - 1],
                "loss at half time": float(np.interp(whole / 2, at, losses)),
                "times sooner": None if first is None else whole / reached,
            }
        )
    return rows


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


def time_overlap(world: shoal.World, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop in each round. Collective."""
    name, strategy = given.models[0], given.strategies[0]
    gpt, compiled = name == "gpt2", strategy == "compiled"
    batch = SEQUENCES if gpt else ROWS
    data = sequences(16 * batch, CONTEXT, WORDS) if gpt else labelled(4 * batch, WIDTH, WIDTH)
    ours = through_shoal(
        world,
        build(name),
        data,
        batch,
        strategy=shoal.FSDP() if strategy == "fsdp" else shoal.DDP(),
        clip=1.0,
        compiled="inductor" if compiled else None,
    )
    loops: dict[str, Iterator[Any]] = {
        "plain": plain(world, name, strategy, data, batch),
        "shoal": ours,
        "compute": plain(world, name, "none compiled" if compiled else "none", data, batch),
        "communication": communication(world, name, strategy),
    }
    steps = {each: loop.__next__ for each, loop in loops.items()}
    return time_steps(world, steps, rounds=given.rounds, steps=given.steps, warm_up=WARM_UP)


def overlap_rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the times, and the hidden fraction of communication."""
    rows = time_rows(times, "plain")
    for row in rows[:2]:
        three = zip(times[row["loop"]], times["compute"], times["communication"], strict=True)
        row["hidden"] = quartiles([1 - (step - compute) / wire for step, compute, wire in three])
    return rows


def main() -> None:
    lists = {"nodes": [2], "rates": ["200mbit", "1gbit", "none"]}
    of_overlap = {"models": ["linear", "gpt2"], "strategies": ["ddp"], "steps": 6}
    given = parse(__doc__, what=("methods", "overlap"), **lists, **of_overlap, rounds=6, results=Path)
    methods = given.what == "methods"
    if given.results is not None:  # on a rank
        sharded = not methods and given.strategies == ["fsdp"]
        with shoal.init(seed=0, layout="shard=-1" if sharded else "replicate=-1") as world:
            found = (train_methods if methods else time_overlap)(world, given)
            cluster.write_results(world, given.results, found)
        return
    figures = {}
    cases = [("", "")] if methods else [*itertools.product(given.models, given.strategies)]
    for count in given.nodes:
        with cluster.started(count) as nodes:
            for rate, (name, strategy) in itertools.product(given.rates, cases):
                cluster.limit(nodes, rate)
                options = ["--what", given.what, "--rounds", str(given.rounds)]
                options += ["--steps", str(given.steps)]
                options += [] if methods else ["--models", name, "--strategies", strategy]
                found, printed = cluster.results_of(nodes, __file__, options)
                chosen = [line for line in printed.splitlines() if "compression of" in line]
                rows = (method_rows if methods else overlap_rows)(found)
                figures[f"{count} {rate} {name} {strategy}"] = rows
                title = f"{count} nodes, {rate} {name} {strategy}, {machine()}"
                show("; ".join([title, *chosen]), rows)
    finish(given, {given.what: figures})


if __name__ == "__main__":
    main()
