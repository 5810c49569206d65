"""Seconds of the first and of later steps of a GPT: eager, compiled whole, and by its blocks.

"torch" is the loop in hand-written torch, with `torch.compile(model)` and `block.compile()`.

python benchmarks/gpu/compile_time.py                     # 12 blocks, on this machine's CPU or GPU
python benchmarks/gpu/compile_time.py --layers 24 --rounds 5

Each measurement is a process of its own with an empty compiler cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

import shoal
from gpt import GPT

import harness  # isort: skip

HOW = {"eager": None, "inductor": "inductor", "blocks": "blocks"}
WAYS = [f"{whose} {how}" for how in HOW for whose in ("torch", "shoal")]


def by_hand(given: argparse.Namespace, how: str | None, tokens: Tensor) -> Callable[[], float]:
    """Return a step in plain torch, which returns the loss."""
    model = GPT(given).to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call = torch.compile(model) if how == "inductor" else model
    if how == "blocks":
        for block in model.blocks:
            block.compile()
    batches = cycle(tokens.split(given.batch))

    def step() -> float:
        batch = next(batches)
        loss = call(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def by_shoal(
    given: argparse.Namespace, how: str | None, tokens: Tensor, world: shoal.World
) -> Callable[[], float]:
    """Return a step through Shoal, which returns the loss."""
    model = shoal.parallelize(GPT(given), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    task = shoal.Task(
        lambda loss, batch: (loss, batch[1].numel()), inputs=lambda batch: (batch[0], batch[1])
    )
    step = shoal.Step(model, optimizer, task, compile=how)
    batches = shoal.Loader((tokens[:, :-1], tokens[:, 1:]), world, batch_size=given.batch).epochs(10**9)
    return lambda: float(step(next(batches)).loss)


def measure(given: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the first step, and the median of the later ones."""
    whose, how = given.way.split()
    with shoal.init() as world:
        tokens = torch.randint(0, given.words, (given.batch * 2, given.context + 1))
        if whose == "torch":
            step = by_hand(given, HOW[how], tokens.to(world.device))
        else:
            step = by_shoal(given, HOW[how], tokens, world)
        times = []
        for _ in range(1 + given.steps):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
    return times[0], statistics.median(times[1:])


def apart(given: argparse.Namespace, way: str) -> tuple[float, float]:
    """Return what a process of its own measures."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    first, later = json.loads(done.stdout.splitlines()[-1])
    return first, later


def main() -> None:
    """Measure, and print."""
    shape = {"layers": 12, "width": 256, "heads": 4, "context": 128, "batch": 4, "words": 4096}
    given = harness.parse(__doc__, ways={way: way for way in WAYS}, **shape, rounds=3, steps=8, way=str)
    if given.way is not None:  # in a process of its own
        print(json.dumps(measure(given)))
        return
    found = harness.alternate({way: partial(apart, given, way) for way in given.ways}, given.rounds)
    rows = []
    for way, rounds in found.items():
        first, later = map(harness.spread, zip(*rounds, strict=True))
        rows.append({"way": way, "first step, s": first, "later steps, s": later})
    harness.show(f"{given.layers} blocks, {harness.machine()}", rows)
    harness.finish(given, {"compile_time": rows})


if __name__ == "__main__":
    main()
