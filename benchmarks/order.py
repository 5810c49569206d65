"""Speed of `shoal.Permutation` on one core: positions a second, and a seek of 16 positions.

    python benchmarks/order.py [--rounds 9] [--json]

For comparison: full shuffles by torch.randperm and NumPy, if a table of 8 bytes a sample is small.
Seeks start at random positions of the first, middle and last third of the order. A fresh seek makes its
`Permutation` first, as a new epoch does.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from harness import alternate, finish, machine, parse, quartiles, show
from shoal.data.permutation import Permutation

TABLE = 10**6  # the largest order that is also shuffled as a table
SEEKS, SEEK = 300, 16


def seconds(work: Callable[..., object], *arguments: int) -> float:
    began = perf_counter()
    work(*arguments)
    return perf_counter() - began


def fresh_seek(size: int, epoch: int, at: int) -> object:
    return Permutation(size, seed=0, epoch=epoch).indices(at, at + SEEK)


def read_rates(size: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return million positions a second of each contestant."""
    order = Permutation(size, seed=0)
    count = min(size, given.read)
    start = (size - count) // 2
    numpy_random = np.random.default_rng(0)
    works: dict[str, Callable[[], object]] = {"shoal": lambda: order.indices(start, start + count)}
    if size <= TABLE:
        works["randperm"] = lambda: torch.randperm(size)
        works["NumPy"] = lambda: numpy_random.permutation(size)
    repeats = max(1, 200_000 // count)  # so that a round of a small size can be timed
    actions = {
        name: lambda work=work: sum(seconds(work) for _ in range(repeats))
        for name, work in works.items()
    }
    times = alternate(actions, given.rounds)
    return {
        f"{name}, M/s": quartiles([repeats * count / t / 1e6 for t in own])
        for name, own in times.items()
    }


def seek_times(size: int) -> dict[str, Any]:
    """Return microseconds to the indices at 16 positions, by third of the order, and in a new one."""
    order = Permutation(size, seed=0)
    draw = random.Random(0)
    thirds = ("first", "middle", "last")
    times: dict[str, list[float]] = {name: [] for name in (*thirds, "fresh")}
    for turn in range(SEEKS):
        for third, name in enumerate(thirds):
            at = draw.randint(third * size // 3, (third + 1) * size // 3 - SEEK)
            times[name].append(seconds(order.indices, at, at + SEEK))
        times["fresh"].append(seconds(fresh_seek, size, turn, at))
    return {f"seek {name}, µs": 1e6 * median(taken) for name, taken in times.items()}


def main() -> None:
    given = parse(__doc__, rounds=9, read=4_000_000, exponents=[3, 6, 9, 12])
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows = [
        {"n": f"10**{each}", **read_rates(10**each, given), **seek_times(10**each)}
        for each in given.exponents
    ]
    show(f"numpy {np.__version__}, one core, {SEEK} positions a seek, {machine()}", rows)
    finish(given, {"order": rows})


if __name__ == "__main__":
    main()
