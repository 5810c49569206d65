"""Time, bytes and loss of gradient compression on a low-bandwidth network, compared with plain DDP.

    python benchmarks/compression.py [--nodes 2 4] [--rates 200mbit 1gbit none] [--rounds 6] [--json]

Starts a Slurm cluster on this machine (see cluster.py): a network namespace and a link for each node.
In one job each strategy trains a model of 2.4 million parameters on the outputs of a random network.
The baseline is plain DDP, the loop of PyTorch's tutorial. Bytes are those that the kernel counted on
the first node's interface. The loss is that of held-out samples: after equal steps, and after the time
that plain DDP took for half of them. Then each strategy continues alone until it reaches the final loss
of plain DDP, or has taken as long: `sooner` is the ratio of the two times.

Aims: at 200 Mbit/s a strategy that takes a third of plain DDP's time to the same loss; "auto" within
5 % of the best; on a link without a limit never slower than plain DDP.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cluster
import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show
from loops import by_hand, through_shoal

WIDTH, HIDDEN, CLASSES = 256, 1400, 64
SAMPLES, HELD_OUT, BATCH = 65_536, 2048, 128
STEPS = 8
"""Steps per round and strategy."""
UNCOUNTED = 2
"""Rounds that train but are not timed: PowerSGD sends full gradients during them."""
PLAIN = "plain DDP"
WAYS: dict[str, Any] = {
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


def network(seed: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(WIDTH, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, CLASSES))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def lesson() -> tuple[Tensor, Tensor]:
    """Return inputs, and the teacher's outputs for them."""
    teacher = network(1, 64)
    inputs = torch.randn(SAMPLES + HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Contender:
    """A strategy or plain DDP, its model, and its measurements."""

    def __init__(self, world: shoal.World, name: str, data: tuple[Tensor, Tensor]) -> None:
        self.model = network(3, HIDDEN)
        options: dict[str, Any] = {"optimizer": adamw, "clip": 1.0}
        training = (data[0][:SAMPLES], data[1][:SAMPLES])
        self.steps: Any = (
            by_hand(world, self.model, training, BATCH, **options)
            if name == PLAIN
            else through_shoal(world, self.model, training, BATCH, strategy=WAYS[name], **options)
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


def train(rounds: int, results: Path) -> None:
    """Train and measure on each rank."""
    with shoal.init() as world:
        data = lesson()
        ways = {name: Contender(world, name, data) for name in WAYS}
        alternate({name: way.round for name, way in ways.items()}, rounds, uncounted=UNCOUNTED)
        for way in ways.values():
            while world.broadcast(way.behind(ways[PLAIN])):
                way.round()
        if world.is_rank_zero:
            found = {n: [w.seconds, w.bytes, w.losses] for n, w in ways.items()}
            results.write_text(json.dumps(found))


def reached(at: list[float], losses: list[float], wanted: float) -> float | None:
    """Return the time at which the loss reaches `wanted`, interpolated between measurements."""
    for number, value in enumerate(losses):
        if value <= wanted:
            if number == 0:
                return at[0]
            before = losses[number - 1]
            part = (before - wanted) / (before - value)
            return at[number - 1] + part * (at[number] - at[number - 1])
    return None


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each strategy seconds and bytes of a step, its ratio to plain DDP, and the losses."""
    base, _, plain_losses = found[PLAIN]
    rounds, whole = len(base), sum(base[UNCOUNTED:])
    rows = []
    for name, (times, sent, all_losses) in found.items():
        seconds, counted = times[UNCOUNTED:rounds], sent[UNCOUNTED:rounds]
        losses = all_losses[UNCOUNTED - 1 :]
        at = [sum(times[UNCOUNTED : UNCOUNTED + n]) for n in range(len(losses))]
        sooner = reached(at, losses, plain_losses[-1])
        rows.append(
            {
                "strategy": name,
                "s per step": quartiles([each / STEPS for each in seconds]),
                "MB per step": sum(counted) / len(counted) / STEPS / 1e6,
                f"/ {PLAIN}": quartiles(ratios(seconds, base[UNCOUNTED:])),
                "loss": all_losses[rounds - 1],
                "loss at half time": float(np.interp(whole / 2, at, losses)),
                "times sooner": None if sooner is None else whole / sooner,
            }
        )
    return rows


def main() -> None:
    lists = {"nodes": [2, 4], "rates": ["200mbit", "1gbit", "none"]}
    given = parse(__doc__, **lists, rounds=6, results=Path)
    if given.results is not None:  # on a rank
        train(given.rounds, given.results)
        return
    figures = {}
    for count in given.nodes:
        with cluster.started(count) as nodes, tempfile.TemporaryDirectory() as folder:
            for rate in given.rates:
                cluster.limit(nodes, rate)
                results = Path(folder) / rate
                arguments = ["--rounds", str(given.rounds), "--results", str(results)]
                printed = cluster.run_ranks(nodes, __file__, arguments)
                chosen = [line for line in printed.splitlines() if "compression of" in line]
                figures[f"{count} {rate}"] = rows = rows_of(json.loads(results.read_text()))
                show("; ".join([f"{count} nodes, {rate}, {machine()}", *chosen]), rows)
    finish(given, figures)


if __name__ == "__main__":
    main()
