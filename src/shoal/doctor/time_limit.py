"""A time limit for work that may hang or raise: it runs in threads, so the caller can continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from shoal.util.errors import ShoalError


class TimedOutcome(TypedDict):
    """The outcome of work: a value that JSON holds, or the error; `hung` if it is still running."""

    value: Any
    trouble: str
    hung: bool


def beside(works: Mapping[str, Callable[[], object]], limit: float) -> dict[str, TimedOutcome]:
    """Do all of `works` at once, in threads, and return their outcomes within `limit` seconds.

    A thread blocked by a dead file system can't be ended. It is abandoned, and ends with the process.
    """
    done: dict[str, TimedOutcome] = {}
    threads = [
        threading.Thread(target=_do, args=(name, work, done), daemon=True)
        for name, work in works.items()
    ]
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = dict(done)  # work that ends from now on is late
    late = TimedOutcome(value=None, trouble=f"not finished within {limit:g} s", hung=True)
    return {name: found.get(name, late) for name in works}


def _do(name: str, work: Callable[[], object], done: dict[str, TimedOutcome]) -> None:
    try:
        done[name] = TimedOutcome(value=work(), trouble="", hung=False)
    except ShoalError as error:
        done[name] = TimedOutcome(value=None, trouble=f"{error.found}; {error.fix}", hung=False)
    except BaseException as error:  # any error of a rank is a line of the report
        lines = str(error).splitlines() or [""]
        done[name] = TimedOutcome(
            value=None, trouble=f"{type(error).__name__}: {lines[0]}".rstrip(": "), hung=False
        )
