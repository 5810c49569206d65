"""Overhead of hang detection, and of the check of collectives in the first steps.

    python benchmarks/watch.py [--rounds 40] [--steps 100] [--json]

A tiny model under DDP on two ranks, through `shoal run`, takes steps with neither, with the watch, and
with the watch and the check that compares each collective between ranks. A round runs all three, in an
order that rotates; ratios are taken within rounds, so that drift cancels.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch

import shoal
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.watchdog.mismatch import CollectiveMatcher
from shoal.distributed.watchdog.watch import Watch

MODES = ("neither", "watch", "watch and check")
WIDTH, BATCH, SETTLE = 32, 32, 20


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def begin(world: shoal.World, mode: str) -> ExitStack:
    """Start what a mode needs; closing the stack ends it."""
    started = ExitStack()
    matching = CollectiveMatcher(world.rank) if mode == "watch and check" else None
    if matching is not None:
        started.callback(matching.stop)
    if mode != "neither" and world.group is not None:
        watch = Watch(
            world.group,
            limits=WaitLimits(step=600.0, prepare=3600.0),
            address="127.0.0.1",
            directory=lambda: None,
            checked=lambda: None if matching is None else matching.current,
        )
        started.callback(watch.stop)
    return started


def rounds(world: shoal.World, count: int, steps: int) -> dict[str, list[float]]:
    """Return the microseconds per step of each mode, round by round."""
    model = shoal.parallelize(torch.nn.Linear(WIDTH, WIDTH), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-4), shoal.Task(loss))
    loader = shoal.Loader((torch.randn(1024, WIDTH),), world, batch_size=BATCH)
    data = loader.epochs(10**9)
    for batch in islice(data, 50):
        step(batch)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(count):
        turn = number % len(MODES)
        for mode in MODES[turn:] + MODES[:turn]:
            with begin(world, mode):
                gc.collect()  # garbage of the start does not belong to a step
                for batch in islice(data, SETTLE):  # time for a thread to start
                    step(batch)
                world.barrier()
                begun = time.perf_counter()
                for batch in islice(data, steps):
                    step(batch)
                times[mode].append((time.perf_counter() - begun) / steps * 1e6)
    return times


def work(count: int, steps: int) -> None:
    with shoal.init(seed=0) as world:
        world.watchdog.leave()  # it would run in all modes
        times = rounds(world, count, steps)
        if world.is_rank_zero:
            print(json.dumps(times), flush=True)


def show(times: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    print(f"{'':16} {'us a step':>10} {'ratio':>8}  (quartiles)")
    for mode in MODES:
        ratios = [a / b for a, b in zip(times[mode], times["neither"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures |= {f"{mode}, us": statistics.median(times[mode]), f"{mode}, ratio": middle}
        print(f"{mode:16} {figures[f'{mode}, us']:10.1f} {middle:8.3f}  ({low:.3f} to {high:.3f})")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        work(given.rounds, given.steps)
        return
    options = ["--rank", "--rounds", str(given.rounds), "--steps", str(given.steps)]
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", __file__, "--", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = show(json.loads(done.stdout.splitlines()[-1]))
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
