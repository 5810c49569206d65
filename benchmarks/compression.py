"""Fewer bytes over slow links: time, bytes and loss of each way, beside plain DDP, in one run.

    python benchmarks/compression.py [--nodes 2 4] [--rates 200mbit 1gbit none] [--rounds 6] [--json]

Starts a Slurm cluster on this machine, a network namespace and a link for each node, which needs root,
slurm-wlm, munge and iproute2. In one job each way trains a model of its own, 2.4 million parameters on
a task that a random network teaches; a round is some steps of each way, in an order that turns. Bytes
are those that the kernel counted on the first node's interface. The loss is that of samples which
nobody trained on: after equal steps, and after the time that plain DDP took for half of them. Then each
way goes on alone until it has the loss that DDP has at the end, or has taken as long: how much sooner
than DDP it comes there.

Aims: at 200 Mbit/s a way that takes a third of DDP's time to the same loss; "auto" within 5 % of the
best; on a link without a limit never slower than plain DDP.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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

import shoal
from spread import quartiles

WIDTH, HIDDEN, CLASSES = 256, 1400, 64
SAMPLES, HELD_OUT, BATCH = 65_536, 2048, 128
STEPS = 8
"""In a round, of each way."""
UNCOUNTED = 2
"""Rounds, but learned from: as long as PowerSGD sends whole gradients."""
WAYS: dict[str, Any] = {
    "DDP": shoal.DDP(),
    "fp16": shoal.DDP(compress="fp16"),
    "bf16": shoal.DDP(compress="bf16"),
    "int8": shoal.DDP(compress="int8"),
    "PowerSGD": shoal.DDP(compress=shoal.PowerSGD()),
    "TopK": shoal.DDP(compress=shoal.TopK(share=0.01)),
    "auto": shoal.DDP(compress="auto"),
    "LocalSGD": shoal.LocalSGD(every=8),
    "DiLoCo": shoal.DiLoCo(every=24),
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
    """Inputs, and what the teacher makes of them."""
    teacher = network(1, 64)
    inputs = torch.randn(SAMPLES + HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


class Contender:
    """A way, its model, and what was measured of it."""

    def __init__(self, world: shoal.World, strategy: Any, data: tuple[Tensor, Tensor]) -> None:
        self.model = shoal.parallelize(network(3, HIDDEN), world, strategy)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = shoal.Step(self.model, optimizer, shoal.Task(loss), clip=1.0)
        inputs, labels = data
        loader = shoal.Loader((inputs[:SAMPLES], labels[:SAMPLES]), world, batch_size=BATCH)
        self.batches: Iterator[shoal.Batch] = loader.epochs(100)
        self.held_out = (inputs[SAMPLES:], labels[SAMPLES:])
        self.times: list[float] = []
        self.bytes: list[int] = []
        self.losses: list[float] = []
        self.world = world

    def round(self) -> None:
        self.world.barrier()
        sent, begun = int(COUNTER.read_text()), time.perf_counter()
        for _ in range(STEPS):
            self.step(next(self.batches))
        self.world.barrier()
        self.times.append(time.perf_counter() - begun)
        self.bytes.append(int(COUNTER.read_text()) - sent)
        with torch.no_grad():  # this rank's parameters, which may be on a way of their own
            inputs, labels = self.held_out
            self.losses.append(float(F.cross_entropy(self.model(inputs), labels)))

    def behind(self, other: Contender) -> bool:
        """Whether it has a larger loss than the other, and has taken less time."""
        later = self.losses[-1] > other.losses[-1]
        return later and sum(self.times[UNCOUNTED:]) < sum(other.times[UNCOUNTED:])


def train(rounds: int, results: Path) -> None:
    """What each rank does."""
    with shoal.init() as world:
        data = lesson()
        ways = {name: Contender(world, strategy, data) for name, strategy in WAYS.items()}
        names = list(ways)
        for number in range(-UNCOUNTED, rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                ways[name].round()
        plain = ways["DDP"]
        for way in ways.values():
            while world.broadcast(way.behind(plain)):
                way.round()
        if world.first:
            found = {n: {"s": w.times, "bytes": w.bytes, "loss": w.losses} for n, w in ways.items()}
            results.write_text(json.dumps(found))


def reached(at: list[float], losses: list[float], wanted: float) -> float | None:
    """The time at which the loss comes to `wanted`, on the lines between what was measured."""
    for number, value in enumerate(losses):
        if value <= wanted:
            if number == 0:
                return at[0]
            before = losses[number - 1]
            part = (before - wanted) / (before - value)
            return at[number - 1] + part * (at[number] - at[number - 1])
    return None


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Of each way seconds and bytes of a step, its ratio to DDP, and the losses."""
    plain = found["DDP"]
    rounds, whole = len(plain["s"]), sum(plain["s"][UNCOUNTED:])
    rows = {}
    for name, way in found.items():
        seconds, sent = way["s"][UNCOUNTED:rounds], way["bytes"][UNCOUNTED:rounds]
        ratios = [own / other for own, other in zip(seconds, plain["s"][UNCOUNTED:], strict=True)]
        losses = way["loss"][UNCOUNTED - 1 :]
        at = [sum(way["s"][UNCOUNTED : UNCOUNTED + n]) for n in range(len(losses))]
        sooner = reached(at, losses, plain["loss"][-1])
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
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from cluster.slurm import Cluster, missing

    if missing():
        parser.error(missing())
    everything = {}
    for nodes in given.nodes:
        with (
            tempfile.TemporaryDirectory() as folder,
            Cluster(Path(folder) / "cluster", nodes=nodes) as cluster,
        ):
            for rate in given.rates:
                cluster.network.rate(None if rate == "none" else rate)
                results = Path(folder) / rate
                ranks = [
                    "srun",
                    f"-N{nodes}",
                    f"-n{nodes}",
                    sys.executable,
                    str(Path(__file__).resolve()),
                ]
                ranks += ["--rounds", str(given.rounds), "--results", str(results)]
                done = subprocess.run(  # `Cluster.run` gives up too soon for this
                    cluster.inside("ctl", ranks),
                    env=cluster.environment(),
                    capture_output=True,
                    text=True,
                    timeout=3600,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(done.stderr)
                chosen = [line for line in done.stdout.splitlines() if "compression of" in line]
                print(
                    f"{nodes} nodes, {rate}: s and MB a step, time / DDP's, loss; {'; '.join(chosen)}"
                )
                rows = everything[f"{nodes} {rate}"] = told(json.loads(results.read_text()))
                for name, row in rows.items():
                    step, ratio = row["step"], row["ratio"]
                    sooner = "not" if row["sooner"] is None else f"{row['sooner']:.2f} times sooner"
                    print(
                        f"  {name:9} {step['median']:.3f} s  {row['megabytes']:7.3f} MB  "
                        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})  "
                        f"loss {row['loss']:.3f}, at DDP's half time {row['loss_at_half_time']:.3f}, "
                        f"at DDP's last loss {sooner}"
                    )
    if given.json:
        print(json.dumps(everything))


if __name__ == "__main__":
    main()
