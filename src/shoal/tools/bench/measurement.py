"""The common parts of measurements: turns, samples, Ctrl-C, and results as text, CSV and JSON."""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from shoal.distributed.init import init
from shoal.distributed.world import World
from shoal.tools.bench.import_target import require_alone
from shoal.tools.report.html import write_csv
from shoal.util import accelerator
from shoal.util.clock import CLOCK
from shoal.util.document import Document, to_plain
from shoal.util.signal_handler import handle_signals
from shoal.util.tables import plain_console, print_document, print_line, print_path

T = TypeVar("T")

LEAST = 3
"""Minimum number of samples."""


class InterruptFlag:
    """Whether a signal asked for the end: its number in `asked`, or 0.

    If `at_once` is set, the first signal also raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.at_once = False

    def handle(self, number: int, _: object) -> None:
        """Set the flag. A second signal has its usual effect."""
        again, self.asked = bool(self.asked), number
        if again or self.at_once:
            raise KeyboardInterrupt


@contextmanager
def keep_on_interrupt() -> Iterator[InterruptFlag]:
    """Yield a flag that the first SIGINT or SIGTERM sets, so that the results so far are kept."""
    flag = InterruptFlag()
    numbers = (signal.SIGINT, signal.SIGTERM)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    with handle_signals(heard, flag.handle):
        yield flag


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a result goes in addition to the terminal: a CSV file, a line of JSON at the end."""

    csv: Path | None = None
    json: bool = False

    def show(self, document: Document, rows: Sequence[Mapping[str, object]]) -> None:
        """Print a document, and write the rows as CSV and its values as JSON if asked for.

        Raises LaunchError if the file can't be written.
        """
        console = plain_console()
        print_document(console, document)
        if self.csv is not None:
            write_csv(self.csv, rows)
            print_path(console, f"figures: {self.csv}")
        if self.json:
            print_path(console, json.dumps(to_plain(document.values)))


Result = tuple[Document, Sequence[Mapping[str, object]]]
"""A document, and its figures as rows of a CSV file."""


def measure_alone(
    command: str, measure: Callable[[World, InterruptFlag], Result | None], output: Output
) -> int:
    """Measure in the World of a single process, show the result, and return the exit code.

    `measure` returns None if Ctrl-C came before its first result. Raises LaunchError on one of several
    ranks.
    """
    require_alone(command)
    world = init()
    try:  # not `with`, which would add a line of this file to the traceback
        with keep_on_interrupt() as interrupts:
            found = measure(world, interrupts)
    finally:
        world.close()
    if found is None:
        print_line(plain_console(stderr=True), "Ended before the first measurement.")
    else:
        output.show(*found)
    return 128 + interrupts.asked if interrupts.asked else 0


def in_turns(items: Sequence[T], rounds: int, seconds_left: Callable[[], float]) -> Iterator[T]:
    """Yield the items in rounds, at most LEAST if there is no time left.

    The direction alternates, so that no item always follows the same other one.
    """
    for number in range(rounds):
        if number >= LEAST and seconds_left() <= 0:
            return
        yield from items if number % 2 == 0 else reversed(items)


def time_calls(call: Callable[[], object], times: int = 1, device: torch.device | None = None) -> float:
    """Return the seconds per call, of several calls one after the other."""
    begun = CLOCK.now()
    for _ in range(times):
        call()
    if device is not None:
        accelerator.synchronize(device)
    return (CLOCK.now() - begun) / times


def calls_for(seconds: float, call_seconds: float, most: int) -> int:
    """Return how many calls fill a sample: a single short one would be lost in the clock's noise."""
    return min(most, max(1, math.ceil(seconds / max(call_seconds, 1e-9))))


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high
