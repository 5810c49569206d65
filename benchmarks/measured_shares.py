"""The gain of `Loader(shares="measured")` with one rank on half a core, in paired rounds.

    python benchmarks/measured_shares.py [--width 512] [--batch 1024] [--rounds 20] [--json]

Two ranks have a core each, and a process that computes all the time shares the core of rank 1. Each
rank has one thread. The ranks train three models in turn:

    plain       DistributedDataParallel and DataLoader with a DistributedSampler
    equal       shoal.Loader with equal numbers of samples
    measured    with measured numbers, which adapt before the first round

A ratio is that of the times of one round, with the 95 % confidence interval of its median. The gradient
of one batch is compared with that of one process in float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from spread import Spread, interval

RANKS, SAMPLES, LEAST = 2, 4096, 1.3
ADAPT_SECONDS, SETTLED_SECONDS = 90.0, 20.0


def build(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers).to(dtype)


def data(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, width, generator=generator)
    return inputs.to(dtype), torch.arange(SAMPLES) % width


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


BUSY = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
"""A program that computes all the time on one core."""


class PlainLoop:
    """The loop of PyTorch's tutorials."""

    def __init__(self, world: shoal.World, options: argparse.Namespace) -> None:
        self._steps = self._train(world, options)

    def _train(self, world: shoal.World, options: argparse.Namespace) -> Iterator[None]:
        model = nn.parallel.DistributedDataParallel(build(options.width))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        dataset = TensorDataset(*data(options.width))
        sampler: Any = DistributedSampler(dataset, world.size, world.rank)
        loader = DataLoader(dataset, options.batch // world.size, sampler=sampler)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    def take_steps(self, steps: int) -> None:
        for _ in itertools.islice(self._steps, steps):
            pass


class TrainingLoop:
    """One model that trains with equal or measured numbers of samples."""

    def __init__(self, world: shoal.World, options: argparse.Namespace, shares: str) -> None:
        model = shoal.parallelize(build(options.width), world)
        self._step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3), shoal.Task(loss))
        self.loader = shoal.Loader(data(options.width), world, batch_size=options.batch, shares=shares)
        self._batches = self.loader.epochs(10**9)

    def take_steps(self, steps: int) -> None:
        for batch in itertools.islice(self._batches, steps):
            self._step(batch)

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of each rank in a batch."""
        assert self.loader.balance is not None
        return self.loader.balance.shares


def gradient(world: shoal.World, options: argparse.Namespace, samples: tuple[int, ...] = ()) -> Tensor:
    """Return the gradient of the first batch in float64, with `samples` of each rank."""
    model = shoal.parallelize(build(options.width, torch.float64), world)
    loader = shoal.Loader(
        data(options.width, torch.float64),
        world,
        batch_size=options.batch,
        shares="measured" if samples else "equal",
    )
    loader.replay({0: samples}, 10**12)
    batch = next(iter(loader.epochs(1)))
    for inputs, labels in batch:
        total = F.cross_entropy(model(inputs), labels, reduction="sum")
        batch.backward(total=total, count=len(labels), model=model)
    batch.finish(model)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def adapt(world: shoal.World, loop: TrainingLoop) -> None:
    """Train until the numbers of samples have changed and then stayed the same for some time."""
    begun = time.perf_counter()
    changed = None
    while True:
        now = time.perf_counter()
        settled = changed is not None and now - changed > SETTLED_SECONDS
        if world.broadcast(settled or now - begun > ADAPT_SECONDS):
            return
        before = loop.samples
        loop.take_steps(20)
        if loop.samples != before:
            changed = time.perf_counter()


def measure(options: argparse.Namespace) -> None:
    """Measure the loops on this rank; rank 0 writes the figures and the gradient."""
    with shoal.init(device="cpu") as world:
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        core = cores[world.rank % len(cores)]
        os.sched_setaffinity(0, {core})
        neighbour = None
        if world.rank == 1:
            neighbour = subprocess.Popen([sys.executable, "-c", BUSY % core])
        measured = TrainingLoop(world, options, "measured")
        loops: dict[str, PlainLoop | TrainingLoop] = {
            "plain": PlainLoop(world, options),
            "equal": TrainingLoop(world, options, "equal"),
            "measured": measured,
        }
        adapt(world, measured)
        samples = measured.samples
        measured.loader.replay({}, 10**12)  # the numbers stay
        times: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(options.rounds):
            for name in list(loops)[:: 1 if number % 2 else -1]:
                world.barrier()
                begun = time.perf_counter()
                loops[name].take_steps(options.steps)
                slowest = max(world.gather(time.perf_counter() - begun))
                times[name].append(slowest / options.steps * 1e3)
        if neighbour is not None:
            neighbour.kill()
        together = gradient(world, options, samples)
        if world.is_rank_zero:
            np.save(options.inside / "gradient.npy", together.numpy())
            (options.inside / "times.json").write_text(json.dumps([samples, times]))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run the job, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"--{name}={getattr(options, name)}" for name in ("width", "batch", "rounds", "steps")]
        run = [sys.executable, "-m", "shoal", "run", "-n", str(RANKS), __file__, "--"]
        subprocess.run([*run, *given, f"--inside={folder}"], check=True, stdout=subprocess.DEVNULL)
        samples, times = json.loads((Path(folder) / "times.json").read_text())
        together = torch.from_numpy(np.load(Path(folder) / "gradient.npy"))
    with shoal.init(device="cpu") as alone:
        expected = gradient(alone, options)
    ratio = {
        name: interval([a / b for a, b in zip(times[name], times["measured"], strict=True)])
        for name in ("plain", "equal")
    }
    return {
        "width": options.width,
        "batch": options.batch,
        "rounds": options.rounds,
        "samples": samples,
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "plain / measured": asdict(ratio["plain"]),
        "equal / measured": asdict(ratio["equal"]),
        "enough": all(each.low >= LEAST for each in ratio.values()),
        "gradient_error": float((together - expected).norm() / expected.norm()),
    }


def show(figures: dict[str, Any]) -> None:
    fast, slow = figures["samples"]
    print(f"width {figures['width']}, batch {figures['batch']}: {fast} and {slow} samples")
    for name, value in figures["milliseconds"].items():
        print(f"  {name:<10} {value:9.2f} ms per step (median)")
    for name in ("plain / measured", "equal / measured"):
        print(f"  {name:<18} {Spread(**figures[name])}")
    print(f"  at least {LEAST}: {'yes' if figures['enough'] else 'no'}")
    print(f"  gradient compared with one process: {figures['gradient_error']:.1e} (relative)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--batch", type=int, default=1024, help="of both ranks together")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a loop in a round")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        measure(options)
        return
    figures = compare(options)
    show(figures)
    if options.json:
        print(json.dumps({"measured_shares": figures}))


if __name__ == "__main__":
    main()
