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
from functools import partial
from typing import Any

import torch

import shoal
from gpt import GPT, TASK, objective

from harness import alternate, finish, machine, parse, show, spread, timed  # isort: skip
from loops import by_hand, gathered, sequences, through_shoal  # isort: skip

HOW = {"eager": None, "inductor": "inductor", "blocks": "blocks"}
WAYS = [f"{whose} {how}" for how in HOW for whose in ("torch", "shoal")]


def measure(given: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the first step, and the median of the later ones."""
    whose, how = given.way.split()
    with shoal.init() as world:
        torch.manual_seed(0)
        data = sequences(2 * given.batch, given.context, given.words)
        train: Any = partial(through_shoal, task=TASK)
        if whose == "torch":
            train = partial(by_hand, objective=objective, draw=gathered)
        loop = train(world, GPT(given), data, given.batch, compiled=HOW[how])
        times = [timed(world, loop.__next__, 1) for _ in range(1 + given.steps)]
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
    given = parse(__doc__, ways={way: way for way in WAYS}, **shape, rounds=3, steps=8, way=str)
    if given.way is not None:  # in a process of its own
        print(json.dumps(measure(given)))
        return
    found = alternate({way: partial(apart, given, way) for way in given.ways}, given.rounds)
    rows = []
    for way, rounds in found.items():
        first, later = map(spread, zip(*rounds, strict=True))
        rows.append({"way": way, "first step, s": first, "later steps, s": later})
    show(f"{given.layers} blocks, {machine()}", rows)
    finish(given, {"compile_time": rows})


if __name__ == "__main__":
    main()
