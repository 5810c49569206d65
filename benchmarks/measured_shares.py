"""The gain of `Loader(shares="measured")` with one rank on half a core, in paired rounds.

    python benchmarks/measured_shares.py [--width 512] [--batch 1024] [--rounds 20] [--json]

Two ranks have a core each, and a process that computes all the time shares the core of rank 1. Each
rank has one thread. The ranks train three models in turn:

    plain       DistributedDataParallel and DataLoader with a DistributedSampler
    equal       shoal.Loader with equal numbers of samples
    measured    with measured numbers, which adapt before the first round, for at most `--adapt` seconds

The interval of a ratio is that of its median, with 95 % confidence. The gradient of one batch is
compared with that of one process in float64.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from harness import finish, interval, machine, parse, ratios, show, time_rows, time_steps
from loops import by_hand, labelled, loss, stack

RANKS, SAMPLES, LEAST = 2, 4096, 1.3
SETTLED_SECONDS = 20.0
BUSY = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"
"""A program that computes all the time on one core."""


def data(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inputs, labels = labelled(SAMPLES, width, width)
    return inputs.to(dtype), labels


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def shared(world: shoal.World, given: argparse.Namespace, shares: str) -> tuple[Any, shoal.Loader]:
    """Return a loop that trains with equal or measured numbers of samples, and its loader."""
    model = shoal.parallelize(stack(given.width, 4), world)
    step = shoal.Step(model, sgd(model.parameters()), shoal.Task(loss))
    loader = shoal.Loader(data(given.width), world, batch_size=given.batch, shares=shares)
    return map(step, loader.epochs(10**9)), loader


def adapt(world: shoal.World, loop: Any, loader: shoal.Loader, most: float) -> tuple[int, ...]:
    """Train until the samples of ranks have changed and then stayed the same; fix and return them."""
    assert loader.balance is not None
    begun = time.perf_counter()
    changed = None
    while True:
        now = time.perf_counter()
        settled = changed is not None and now - changed > SETTLED_SECONDS
        if world.broadcast(settled or now - begun > most):
            break
        before = loader.balance.shares
        for _ in range(20):
            next(loop)
        if loader.balance.shares != before:
            changed = time.perf_counter()
    samples = loader.balance.shares
    loader.replay({}, 10**12)
    return samples


def gradient(world: shoal.World, given: argparse.Namespace, samples: tuple[int, ...] = ()) -> Tensor:
    """Return the gradient of the first batch in float64, with `samples` of each rank."""
    model: nn.Module = shoal.parallelize(stack(given.width, 4).double(), world)
    loader = shoal.Loader(
        data(given.width, torch.float64),
        world,
        batch_size=given.batch,
        shares="measured" if samples else "equal",
    )
    loader.replay({0: samples}, 10**12)
    batch = next(iter(loader.epochs(1)))
    for inputs, labels in batch:
        total = F.cross_entropy(model(inputs), labels, reduction="sum")
        batch.backward(total=total, count=len(labels), model=model)
    batch.finish(model)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(given: argparse.Namespace) -> tuple[tuple[int, ...], dict[str, list[float]], list[float]]:
    """Return the samples of ranks, the seconds of steps in each round, and the gradient."""
    with shoal.init(device="cpu") as world:
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        core = cores[world.rank % len(cores)]
        os.sched_setaffinity(0, {core})
        neighbour = None
        if world.rank == 1:
            neighbour = subprocess.Popen([sys.executable, "-c", BUSY % core])
        measured, loader = shared(world, given, "measured")
        plain = by_hand(world, stack(given.width, 4), data(given.width), given.batch, optimizer=sgd)
        equal, _ = shared(world, given, "equal")
        loops = {"plain": plain.__next__, "equal": equal.__next__, "measured": measured.__next__}
        samples = adapt(world, measured, loader, given.adapt)
        times = time_steps(world, loops, rounds=given.rounds, steps=given.steps, warm_up=1)
        if neighbour is not None:
            neighbour.kill()
        return samples, times, gradient(world, given, samples).tolist()


def main() -> None:
    sizes = {"width": 512, "batch": 1024, "rounds": 20, "steps": 10, "adapt": 90.0}
    given = parse(__doc__, **sizes)
    samples, times, together = shoal.launch(measure, given, processes=RANKS)[0]
    with shoal.init(device="cpu") as alone:
        expected = gradient(alone, given)
    gains = {name: interval(ratios(times[name], times["measured"])) for name in ("plain", "equal")}
    rows = time_rows(times)
    error = float((torch.tensor(together, dtype=expected.dtype) - expected).norm() / expected.norm())
    show(f"width {given.width}, batch {given.batch}: {samples} samples, {machine()}", rows)
    for name, gain in gains.items():
        print(f"{name} / measured: {gain}; at least {LEAST}: {'yes' if gain.low >= LEAST else 'no'}")
    print(f"gradient compared with one process: {error:.1e} (relative)")
    finish(given, {"samples": samples, "loops": rows, "gains": gains, "gradient_error": error})


if __name__ == "__main__":
    main()
