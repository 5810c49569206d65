"""Outcomes of checks, which may hang or raise: they run in threads, with one time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypedDict

from shoal.util.clock import start_work
from shoal.util.errors import ShoalError


class TimedOutcome(TypedDict):
    """The outcome of work: a value that JSON holds, or the error; `hung` if it is still running."""

    value: Any
    trouble: str
    hung: bool


def run_together(works: Mapping[str, Callable[[], object]], limit: float) -> dict[str, TimedOutcome]:
    """Run all of `works` at once, and return their outcomes within `limit` seconds."""
    futures = {name: start_work(work) for name, work in works.items()}
    done, _ = wait(futures.values(), timeout=limit)
    late = TimedOutcome(value=None, trouble=f"not finished within {limit:g} s", hung=True)
    return {name: _outcome(each) if each in done else late for name, each in futures.items()}


def _outcome(done: Future[object]) -> TimedOutcome:
    error = done.exception()
    if error is None:
        return TimedOutcome(value=done.result(), trouble="", hung=False)
    if isinstance(error, ShoalError):
        return TimedOutcome(value=None, trouble=f"{error.found}; {error.fix}", hung=False)
    # Any error of a rank is a line of the report.
    first = (str(error).splitlines() or [""])[0]
    trouble = f"{type(error).__name__}: {first}".rstrip(": ")
    return TimedOutcome(value=None, trouble=trouble, hung=False)
