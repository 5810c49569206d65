"""Cost of checking for a signal in a step, and the time until ranks agree on the tick to stop in.

    python benchmarks/preempt.py [--rounds 20] [--json]

On 1, 2 and 4 ranks through `shoal run`: nanoseconds of one call of `due`, as `Run.tick` makes it
without a signal, and milliseconds from a signal to one rank until every rank knows the last tick. Then
the step of a small training loop with and without it, interleaved in rounds in a rotating order, as the
median of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.training.preemption import PreemptionHandler

SIZES = (1, 2, 4)
CALLS = 200_000
STEPS = 200


def cost(world: shoal.World) -> float:
    """Return the nanoseconds of one call of `due`."""
    stopping = PreemptionHandler(world)
    stopping.start()
    world.barrier()
    begun = time.perf_counter()
    for _ in range(CALLS):
        stopping.due()
    spent = time.perf_counter() - begun
    stopping.stop()
    return spent / CALLS * 1e9


def agreement(world: shoal.World) -> float:
    """Return the milliseconds from a signal to the last rank until all ranks know, by one clock."""
    stopping = PreemptionHandler(world)
    stopping.start()
    world.barrier()
    sent = time.monotonic()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    while stopping.due() is None:
        time.sleep(1e-4)  # a step
    known = max(world.gather(time.monotonic()))
    stopping.stop()
    return float(known - world.broadcast(sent, source=world.size - 1)) * 1e3


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, stopping: PreemptionHandler | None
) -> float:
    """Return the seconds of STEPS steps, each followed by `due` if there is a `stopping`."""
    inputs = torch.randn(16, 32)
    begun = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        if stopping is not None:
            stopping.due()
    return time.perf_counter() - begun


def ratio(world: shoal.World, rounds: int) -> float:
    """Return the ratio of the times of a tiny model's step with and without it."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    steps(model, optimizer, None)
    ratios = []
    for number in range(rounds):
        times = {}
        for ready in (False, True) if number % 2 else (True, False):
            stopping = PreemptionHandler(world) if ready else None
            if stopping is not None:
                stopping.start()
            world.barrier()
            times[ready] = steps(model, optimizer, stopping)
            if stopping is not None:
                stopping.stop()
        ratios.append(times[True] / times[False])
    return statistics.median(ratios)


def measure(world: shoal.World, rounds: int) -> dict[str, Any]:
    former = signal.getsignal(signal.SIGUSR1)
    spans = []
    for _ in range(rounds):
        spans.append(agreement(world))
        signal.signal(signal.SIGUSR1, former)  # a Stopping that has stopped its run leaves its handler
    return {
        "ranks": world.size,
        "due_ns": statistics.median(cost(world) for _ in range(5)),
        "agreement_ms": {"median": statistics.median(spans), "most": max(spans)},
        "step_ratio": ratio(world, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        torch.set_num_threads(1)
        with shoal.init() as world:
            figures = measure(world, options.rounds)
            if world.is_rank_zero:
                options.inside.write_text(json.dumps(figures))
        return
    found = []
    print(f"{'ranks':>5} {'due, ns':>9} {'agreed, ms':>11} {'at most':>8} {'step, ratio':>12}")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "figures.json"
            again = ["--rounds", str(options.rounds), "--inside", str(result)]
            command = [sys.executable, "-m", "shoal", "run", "-n", str(size), __file__, "--", *again]
            subprocess.run(command, check=True)
            each = json.loads(result.read_text())
        found.append(each)
        span = each["agreement_ms"]
        print(
            f"{each['ranks']:>5} {each['due_ns']:>9.0f} {span['median']:>11.2f} {span['most']:>8.2f} "
            f"{each['step_ratio']:>12.4f}"
        )
    if options.json:
        print(json.dumps({"preempt": found}))


if __name__ == "__main__":
    main()
