"""The common parts of measurements: their target, turns, samples, Ctrl-C, and results in any form.

The user gives the target as `package.module:name` or `path/file.py:name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from shoal.distributed import env_vars
from shoal.distributed.init import init
from shoal.distributed.world import World
from shoal.tools.report.html import write_csv
from shoal.util import accelerator
from shoal.util.arguments import check_file
from shoal.util.clock import CLOCK
from shoal.util.document import Document, to_plain
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.signal_handler import handle_signals
from shoal.util.tables import plain_console, print_document, print_line, print_path


def require_alone(command: str) -> None:
    """Raise LaunchError on one of several ranks: the command measures one process."""
    here = env_vars.placement()
    if here.size > 1:
        raise LaunchError(
            given=f"{command}, on rank {here.rank} of {here.size}",
            found="it measures a single process",
            fix=f"use srun -n 1 {command}, or run it without a launcher",
        )


def import_named(text: str, what: str) -> Any:
    """Import and return the object that `text` identifies; `what` describes it in errors.

    Modules are searched from the current directory on, as by `python -m`. A file is imported under its
    own name, so that code under `if __name__ == "__main__":` does not run. Raises LaunchError if there
    is no such object, or if the import fails.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not place:
        raise LaunchError(
            given=text,
            found="no name after a colon" if not name.isidentifier() or not colon else "no module",
            fix=f"use package.module:{what}, or path/train.py:{what}",
        )
    module = _imported(place, text)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise LaunchError(
            given=text,
            found=f"{place} has no {name}; it has {', '.join(names[:8]) or 'no functions'}",
            fix=f"use {place}:{names[0] if len(names) == 1 else what}"
            if names
            else f"define {name} in {place}",
        ) from None


def call_target(function: object, text: str, *arguments: Any) -> Any:
    """Call a user's function with as many of the arguments as it takes, and return its result.

    Raises LaunchError if it is not callable; or with the place, if it raises.
    """
    if not callable(function):
        raise LaunchError(
            given=text,
            found=f"it is {function!r:.60}, not a function",
            fix="use the name of a function",
        )
    try:
        wanted = [
            each
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty
            and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        wanted = []
    if len(wanted) > len(arguments):
        raise LaunchError(
            given=text,
            found=f"it requires {', '.join(each.name for each in wanted)}; it is called with "
            + ("the world" if arguments else "no arguments"),
            fix="wrap it in a function without required arguments",
        )
    with target_errors(text):
        return function(*arguments[: len(wanted)])


@contextmanager
def target_errors(given: str) -> Iterator[None]:
    """Raise the exceptions of the user's code in this block as LaunchError, with their place."""
    try:
        yield
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:
        raise _target_error(given, error) from error


def _target_error(given: str, error: Exception | SystemExit) -> LaunchError:
    """Return the user's exception as an error with its place, the innermost line of the user's code.

    SystemExit is that of a script which trains, or reads its arguments, when it is imported or called.
    """
    if isinstance(error, SystemExit):
        return LaunchError(
            given=given,
            found=f"it ends with exit code {error.code}",
            fix='move the training into a function: if __name__ == "__main__": main()',
        )
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip()
    # A worker's exception contains its traceback, whose last line is the exception itself.
    line = text.splitlines()[-1] if text else ""
    told = line if line.startswith(type(error).__name__) else f"{type(error).__name__}: {line}"
    return LaunchError(given=given, found=f"it raises {told}{place}", fix="run it alone first")


def _imported(place: str, text: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        check_file(LaunchError, text, path, fix="use the path of a script")
        return _loaded(path, text)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with target_errors(text):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise LaunchError(
                given=text,
                found=str(error),
                fix=f"try python -c 'import {place}' in this directory, or use path/file.py:name",
            ) from None


def _loaded(path: Path, text: str) -> ModuleType:
    """Import the file as a module that its own workers can import again."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LaunchError(
            given=text, found=f"{path} is not a Python file", fix="use the path of a Python script"
        )
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        with target_errors(text):
            spec.loader.exec_module(module)
    except ShoalError:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


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
    world = init(alone=True)
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
