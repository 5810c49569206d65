"""Time and memory of a step of a GPT with dropout 0.1: torch's random numbers, and those of samples.

    python benchmarks/random_draws.py                # compared with a plain loop
    shoal run -n 4 benchmarks/random_draws.py
    python benchmarks/random_draws.py --compile

"torch" is a plain loop, with DDP on several ranks. "ranks" is Shoal with `random="ranks"`; the
difference to "samples" is the cost of the keys. "none" is "ranks" with dropout 0. Memory is the peak of
the process on CPUs, measured in a process of its own for each way with `--ways`, and of the allocator
on GPUs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import shoal
from batch_norm import peak
from gpt import GPT
from harness import finish, machine, parse, show, time_rows, time_steps
from loops import by_hand, gathered, sequences, through_shoal

WAYS = {"torch": "", "none": "ranks", "ranks": "ranks", "samples": "samples"}
WORDS = 256


def main() -> None:
    sizes = {
        "layers": 4,
        "width": 128,
        "heads": 4,
        "context": 64,
        "batch": 16,
        "rounds": 10,
        "steps": 5,
    }
    given = parse(__doc__, ways=WAYS, compile=False, **sizes)
    with shoal.init(seed=0) as world:
        torch.set_num_threads(1)
        data = sequences(8 * given.batch, given.context, WORDS)
        loops = {}
        for way in given.ways:
            torch.manual_seed(0)
            shape = argparse.Namespace(**vars(given), words=WORDS)
            model = GPT(shape, dropout=0.0 if way == "none" else 0.1)
            train: Any = partial(through_shoal, random=WAYS[way])
            if way == "torch":
                train = partial(by_hand, draw=gathered)
            loop = train(world, model, data, given.batch, compiled=given.compile)
            loops[way] = loop.__next__
        times = time_steps(world, loops, rounds=given.rounds, steps=given.steps, warm_up=2)
        rows = time_rows(times, "torch")
        if world.is_rank_zero:
            shape_text = f"{given.layers} layers of {given.width}, {given.batch} sequences"
            title = f"{world.size} rank(s), {shape_text} of {given.context} tokens, {machine()}"
            show(title, rows)
            print(f"peak memory: {peak(world.device) / 2**20:.0f} MiB")
            finish(given, {"random_draws": rows})


if __name__ == "__main__":
    main()
