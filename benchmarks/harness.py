"""Shared parts of the benchmarks: options, rounds that alternate, medians and intervals, tables, JSON.

A round measures each contender once, in an order that rotates. Ratios are within rounds, so that drift
of the machine, such as clocks and heat, affects all contenders in the same way.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import shoal
from shoal.util import accelerator

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("tests", "benchmarks/gpu", "benchmarks/peers"):
    sys.path.append(str(ROOT / _folder))

T = TypeVar("T")
INK = "#7d8590"  # of pictures; readable on white and on black
SVG: Any = {
    # The salt makes the file the same each time; text stays text.
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
"""The style of pictures by matplotlib."""
Row = Mapping[str, Any]


def parse(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of the command line: one for each default, and --json.

    False is a flag, a type an option without a default. A tuple lists the values of which one is
    chosen, by default the first; a mapping those of which several are, by default all. A list takes
    any values.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in defaults.items():
        how: dict[str, Any] = {"default": value, "help": f"default: {value}", "type": type(value)}
        if value is False:
            how = {"action": "store_true"}
        elif isinstance(value, type):
            how = {"type": value}
        elif isinstance(value, tuple):
            how = {"default": value[0], "choices": value, "type": type(value[0])}
        elif isinstance(value, Mapping):
            how = {"default": [*value], "choices": [*value], "nargs": "+", "help": "default: all"}
        elif isinstance(value, list):
            how |= {"nargs": "+", "type": type(value[0])}
        flags = ["-n"] if name == "processes" else []
        parser.add_argument(*flags, f"--{name.replace('_', '-')}", **how)
    parser.add_argument("--json", action="store_true", help="end with one line of figures in JSON")
    return parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some values, and bounds of the others."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return "{} ({} to {})".format(*map(_number, (self.median, self.low, self.high)))


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the lowest and the highest value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def quartiles(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles, for many rounds on a machine with other load."""
    if len(values) == 1:
        return spread(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)


def interval(values: Sequence[float]) -> Spread:
    """Return the median and its 95 % confidence interval by order statistics; for few, all values."""
    ordered, count = sorted(values), len(values)
    below = 0
    chance = 0.5**count
    while chance + math.comb(count, below + 1) * 0.5**count <= 0.025:
        below += 1
        chance += math.comb(count, below) * 0.5**count
    return Spread(
        median=statistics.median(ordered), low=ordered[below], high=ordered[count - 1 - below]
    )


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Return the ratio of the values of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def alternate(
    actions: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    uncounted: int = 0,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, list[T]]:
    """Call each action once in a round, in an order that rotates, and return the results by round.

    Results of the first, `uncounted` rounds are left out. There is no further round if `goes_on`
    returns False after one that counts.
    """
    names = list(actions)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-uncounted, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = actions[name]()
            if number >= 0:
                found[name].append(result)
        if number >= 0 and not goes_on():
            break
    return found


def timed(world: shoal.World, step: Callable[[], object], steps: int) -> float:
    """Return the mean seconds of a step on the slowest rank, the device's time included. Collective."""
    accelerator.synchronize(world.device)
    world.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    accelerator.synchronize(world.device)
    return float(max(world.gather((time.perf_counter() - begun) / steps)))


def time_steps(
    world: shoal.World,
    loops: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    steps: int,
    warm_up: int,
) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop in each round. Collective."""
    for step in loops.values():
        for _ in range(warm_up):
            step()
    return alternate({name: partial(timed, world, step, steps) for name, step in loops.items()}, rounds)


def time_rows(
    times: Mapping[str, Sequence[float]],
    *bases: str,
    summary: Callable[[Sequence[float]], Spread] = quartiles,
) -> list[dict[str, Any]]:
    """Return a row for each loop: milliseconds, and the ratios to the times of other loops."""
    return [
        {"loop": name, "ms": quartiles([1e3 * each for each in own])}
        | {f"/ {base}": summary(ratios(own, times[base])) for base in bases if base in times}
        for name, own in times.items()
    ]


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a title and a table in Markdown; its columns are the keys of the rows."""
    print(f"\n{title}\n")
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    for line in (cells[0], ["-" * width for width in widths], *cells[1:]):
        print(f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |")
    print(flush=True)


def finish(given: argparse.Namespace, figures: Any) -> None:
    """Print the figures as one line of JSON, if it was asked for."""
    if given.json:
        print(json.dumps(figures, default=asdict), flush=True)


def machine() -> str:
    """Return what figures depend on: the version of torch, cores and their load, and the date."""
    today = datetime.datetime.now(datetime.UTC).date()
    cores = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    return f"{versions('shoal', 'torch')}, {cores}, {today}"


def versions(*packages: str) -> str:
    """Return the versions of those packages that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def _number(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
