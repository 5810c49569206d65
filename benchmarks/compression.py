"""Time, bytes and loss of gradient compression on a low-bandwidth network, compared with plain DDP.

    python benchmarks/compression.py [--nodes 2 4] [--rates 200mbit 1gbit none] [--rounds 6] [--json]

Starts a Slurm cluster on this machine (see nodes.py): a network namespace and a link for each node. In
one job each strategy trains a model of 2.4 million parameters on the outputs of a random network. A
round is some steps of each strategy, in an order that rotates. The baseline is plain DDP, the loop of
PyTorch's tutorial. Bytes are those that the kernel counted on the first node's interface. The loss is
that of held-out samples: after equal steps, and after the time that plain DDP took for half of them.
Then each strategy continues alone until it reaches the final loss of plain DDP, or has taken as long:
`sooner` is the ratio of the two times.

Aims: at 200 Mbit/s a strategy that takes a third of plain DDP's time to the same loss; "auto" within
5 % of the best; on a link without a limit never slower than plain DDP.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nodes
import shoal
from spread import quartiles

WIDTH, HIDDEN, CLASSES = 256, 1400, 64
SAMPLES, HELD_OUT, BATCH = 65_536, 2048, 128
STEPS = 8
"""Steps per round and strategy."""
UNCOUNTED = 2
"""Rounds that train but are not timed: PowerSGD sends full gradients during them."""
WAYS: dict[str, Any] = {
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
    return nn.Sequential(
        nn.Linear(WIDTH, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, CLASSES),
    )


def lesson() -> tuple[Tensor, Tensor]:
    """Return inputs, and the teacher's outputs for them."""
    teacher = network(1, 64)
    inputs = torch.randn(SAMPLES + HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


PLAIN = "plain DDP"


def plain(world: shoal.World, model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Train with torch's DDP as its tutorials do."""
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    dataset = TensorDataset(*data)
    sampler: Any = DistributedSampler(dataset, world.size, world.rank)
    loader = DataLoader(dataset, BATCH // world.size, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            F.cross_entropy(replica(inputs), labels).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def through_shoal(
    world: shoal.World, model: nn.Module, strategy: Any, data: tuple[Tensor, Tensor]
) -> Iterator[None]:
    """Train with a strategy of Shoal."""
    loader = shoal.Loader(data, world, batch_size=BATCH)
    shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    for batch in loader.epochs(100):
        step(batch)
        yield


class Contender:
    """A strategy or plain DDP, its model, and its measurements."""

    def __init__(self, world: shoal.World, name: str, data: tuple[Tensor, Tensor]) -> None:
        self.model = network(3, HIDDEN)
        inputs, labels = data
        training = (inputs[:SAMPLES], labels[:SAMPLES])
        self.steps = (
            plain(world, self.model, training)
            if name == PLAIN
            else through_shoal(world, self.model, WAYS[name], training)
        )
        self.held_out = (inputs[SAMPLES:], labels[SAMPLES:])
        self.times: list[float] = []
        self.bytes: list[int] = []
        self.losses: list[float] = []
        self.world = world

    def round(self) -> None:
        self.world.barrier()
        sent, begun = int(COUNTER.read_text()), time.perf_counter()
        for _ in range(STEPS):
            next(self.steps)
        self.world.barrier()
        self.times.append(time.perf_counter() - begun)
        self.bytes.append(int(COUNTER.read_text()) - sent)
        with torch.no_grad():  # this rank's parameters, which may differ from those of others
            inputs, labels = self.held_out
            self.losses.append(float(F.cross_entropy(self.model(inputs), labels)))

    def behind(self, other: Contender) -> bool:
        """Return whether it has a larger loss than the other, and has taken less time."""
        later = self.losses[-1] > other.losses[-1]
        return later and sum(self.times[UNCOUNTED:]) < sum(other.times[UNCOUNTED:])


def train(rounds: int, results: Path) -> None:
    """Train and measure on each rank."""
    with shoal.init() as world:
        data = lesson()
        ways = {name: Contender(world, name, data) for name in (PLAIN, *WAYS)}
        names = list(ways)
        for number in range(-UNCOUNTED, rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                ways[name].round()
        for way in ways.values():
            while world.broadcast(way.behind(ways[PLAIN])):
                way.round()
        if world.is_rank_zero:
            found = {n: {"s": w.times, "bytes": w.bytes, "loss": w.losses} for n, w in ways.items()}
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


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Return for each strategy seconds and bytes of a step, its ratio to plain DDP, and the losses."""
    base = found[PLAIN]
    rounds, whole = len(base["s"]), sum(base["s"][UNCOUNTED:])
    rows = {}
    for name, way in found.items():
        seconds, sent = way["s"][UNCOUNTED:rounds], way["bytes"][UNCOUNTED:rounds]
        ratios = [own / other for own, other in zip(seconds, base["s"][UNCOUNTED:], strict=True)]
        losses = way["loss"][UNCOUNTED - 1 :]
        at = [sum(way["s"][UNCOUNTED : UNCOUNTED + n]) for n in range(len(losses))]
        sooner = reached(at, losses, base["loss"][-1])
        rows[name] = {
            "step": asdict(quartiles([each / STEPS for each in seconds])),
            "ratio": asdict(quartiles(ratios)),
            "megabytes": sum(sent) / len(sent) / STEPS / 1e6,
            "loss": way["loss"][rounds - 1],
            "loss_at_half_time": float(np.interp(whole / 2, at, losses)),
            "sooner": None if sooner is None else whole / sooner,
        }
    return rows


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.results is not None:
        train(given.rounds, given.results)
        return
    everything = {}
    for count in given.nodes:
        with nodes.started(count) as cluster, tempfile.TemporaryDirectory() as folder:
            for rate in given.rates:
                nodes.limit(cluster, rate)
                results = Path(folder) / rate
                arguments = ["--rounds", str(given.rounds), "--results", str(results)]
                printed = nodes.run_ranks(cluster, __file__, arguments)
                chosen = [line for line in printed.splitlines() if "compression of" in line]
                print(
                    f"{count} nodes, {rate}: seconds and MB per step, time / plain DDP's, loss; "
                    f"{'; '.join(chosen)}"
                )
                rows = everything[f"{count} {rate}"] = told(json.loads(results.read_text()))
                for name, row in rows.items():
                    step, ratio = row["step"], row["ratio"]
                    sooner = "not" if row["sooner"] is None else f"{row['sooner']:.2f} times sooner"
                    print(
                        f"  {name:9} {step['median']:.3f} s  {row['megabytes']:7.3f} MB  "
                        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})  "
                        f"loss {row['loss']:.3f}, at half of plain DDP's time "
                        f"{row['loss_at_half_time']:.3f}, at plain DDP's last loss {sooner}"
                    )
    if given.json:
        print(json.dumps(everything))


if __name__ == "__main__":
    main()
