"""Speed of `shoal.Permutation` on one core: positions a second, and a seek of 16 positions.

    python benchmarks/order.py [--json]

For comparison: full shuffles by torch.randperm and NumPy, if a table of 8 bytes a sample is small. The
contestants take turns, so that disturbances affect all of them. Rates are of the median round; `best`
is the fastest one. Seeks start at random positions of the first, middle and last third of the order,
and are medians. A fresh seek makes its `Permutation` first, as a new epoch does.
"""

from __future__ import annotations

import json as json_text
import os
import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
import typer

from shoal.data.permutation import Permutation

SIZES = (10**3, 10**6, 10**9, 10**12)
READ = 4_000_000  # positions per round, or the whole order if it is smaller
TABLE = 10**6  # the largest order that is also shuffled as a table
ROUNDS = 9
SEEKS = 300
SEEK = 16


def seconds(work: Callable[..., object], *arguments: int) -> float:
    began = perf_counter()
    work(*arguments)
    return perf_counter() - began


def fresh_seek(size: int, epoch: int, at: int) -> object:
    return Permutation(size, seed=0, epoch=epoch).indices(at, at + SEEK)


def read_rates(size: int) -> dict[str, float]:
    """Return million positions a second of each contestant."""
    order = Permutation(size, seed=0)
    count = min(size, READ)
    start = (size - count) // 2
    numpy_random = np.random.default_rng(0)
    works: dict[str, Callable[[], object]] = {"order": lambda: order.indices(start, start + count)}
    if size <= TABLE:
        works["torch_randperm"] = lambda: torch.randperm(size)
        works["numpy_permutation"] = lambda: numpy_random.permutation(size)
    repeats = max(1, 200_000 // count)  # so that a round of a small size can be timed
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(sum(seconds(work) for _ in range(repeats)))
    positions = repeats * count / 1e6
    rates = {name: positions / median(taken) for name, taken in times.items()}
    return {**rates, "order_best": positions / min(times["order"])}


def seek_times(size: int) -> dict[str, float]:
    """Return microseconds to the indices at 16 positions, by third of the order, and in a new one."""
    order = Permutation(size, seed=0)
    draw = random.Random(0)
    thirds = ("first", "middle", "last")
    times: dict[str, list[float]] = {name: [] for name in (*thirds, "fresh")}
    for turn in range(SEEKS):
        for third, name in enumerate(thirds):
            low, high = third * size // 3, (third + 1) * size // 3 - SEEK
            at = draw.randint(low, high)
            times[name].append(seconds(order.indices, at, at + SEEK))
        times["fresh"].append(seconds(fresh_seek, size, turn, at))
    return {f"seek_{name}_us": 1e6 * median(taken) for name, taken in times.items()}


def main(json: bool = False) -> None:
    """Print the table; with --json, end with one JSON object of its figures."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(f"numpy {np.__version__}, torch {torch.__version__}, one core, {SEEK} positions a seek\n")
    print(f"{'':>8} {'million positions a second':^42} | {'microseconds a seek':^31}")
    print(
        f"{'n':>8} {'Shoal':>8} {'(best)':>8} {'randperm':>12} {'permutation':>12}"
        f" | {'first':>7} {'middle':>7} {'last':>7} {'fresh':>7}"
    )
    figures: dict[str, dict[str, float]] = {}
    for size in SIZES:
        row = {**read_rates(size), **seek_times(size)}
        figures[str(size)] = row
        tables = [
            f"{row[name]:12.1f}" if name in row else f"{'-':>12}"
            for name in ("torch_randperm", "numpy_permutation")
        ]
        seeks = [f"{row[f'seek_{name}_us']:7.1f}" for name in ("first", "middle", "last", "fresh")]
        label = f"10**{len(str(size)) - 1}"
        print(f"{label:>8} {row['order']:8.1f} {row['order_best']:8.1f}", *tables, "|", *seeks)
    if json:
        print(json_text.dumps({"benchmark": "order", "sizes": figures}))


if __name__ == "__main__":
    typer.run(main)
