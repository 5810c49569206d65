"""The price of `shoal.init(exact="bits")`: step times on several ranks with Gloo, in paired rounds.

    python benchmarks/exact_bits.py [-n 4] [--model linear] [--width 512] [--batch 64]
                                    [--rounds 40] [--steps 10] [--json]

    plain       DistributedDataParallel and DataLoader, one micro-batch per rank
    rounding    Shoal, exact up to rounding, with as many micro-batches as `bits`
    bits        Shoal with exact="bits" and twice as many virtual ranks as ranks

`--model linear` is a stack of linear layers, `gpt` a small causal transformer of width 128, by default
with 32 samples in a batch. Each process has one thread and deterministic algorithms. `exact` belongs to
a World, so each loop has its own ranks, which wait while those of another one run. The interval of a
ratio is that of its median, with 95 % confidence. Aim: `bits` at most 1.15 times `rounding`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import shoal
from harness import alternate, finish, interval, machine, parse, show, time_rows, timed
from helpers.ranks import Ranks
from loops import Transformer, by_hand, labelled, sequences, stack, through_shoal

SAMPLES, WARM_UP, PER_RANK = 2048, 6, 2
"""PER_RANK: virtual ranks of each rank, and micro-batches of `rounding`."""
LENGTH, VOCABULARY = 32, 256
LOOPS = {"plain": "rounding", "rounding": "rounding", "bits": "bits"}
RUNNING: dict[str, Iterator[Any]] = {}
"""The loop of this rank."""


def take_round(world: shoal.World, name: str, given: argparse.Namespace) -> float:
    """Return the seconds of a step on this rank's loop, which the first call begins."""
    if name not in RUNNING:
        gpt = given.model == "gpt"
        width, batch = given.width or (128 if gpt else 512), given.batch or (32 if gpt else 64)
        model = Transformer(VOCABULARY, width, 4, LENGTH) if gpt else stack(width, 6)
        data = sequences(SAMPLES, LENGTH, VOCABULARY) if gpt else labelled(SAMPLES, width, width)
        parts = PER_RANK if name == "rounding" else 1
        RUNNING[name] = (
            by_hand(world, model, data, batch)
            if name == "plain"
            else through_shoal(world, model, data, batch, micro_batches=parts)
        )
        for _ in range(WARM_UP):
            next(RUNNING[name])
    return timed(world, RUNNING[name].__next__, given.steps)


def main() -> None:
    sizes = {"width": int, "batch": int, "rounds": 40, "steps": 10}
    given = parse(__doc__, processes=4, model=("linear", "gpt"), **sizes)
    with ExitStack() as open_ranks:
        turns = {}
        for name, exact in LOOPS.items():
            parts = {"virtual_ranks": PER_RANK * given.processes}
            ranks = Ranks(given.processes, device="cpu", exact=exact, deterministic=True, **parts)
            call = partial(open_ranks.enter_context(ranks).call, take_round, name, given)
            turns[name] = call
        found = alternate(turns, given.rounds, uncounted=1)  # the first round begins the loops
    times = {name: [each[0] for each in rounds] for name, rounds in found.items()}
    rows = time_rows(times, "plain", "rounding", summary=interval)
    show(f"{given.model}, {given.processes} processes, {machine()}", rows)
    finish(given, {"exact_bits": rows})


if __name__ == "__main__":
    main()
