"""Work that may hang or raise, done beside: whoever asked goes on when the time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from shoal.util.errors import ShoalError


class TimedOutcome(TypedDict):
    """What came of it: a value that JSON holds, or the trouble there was; `hung` if it goes on."""

    value: Any
    trouble: str
    hung: bool


def beside(works: Mapping[str, Callable[[], object]], limit: float) -> dict[str, TimedOutcome]:
    """Do all of `works` at once, in threads; what came of each after `limit` seconds at most.

    What a dead file system holds can't be ended: such a thread is left to itself, and ends with the
    process.
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
    found = dict(done)  # one that ends just now is late
    late = TimedOutcome(value=None, trouble=f"no end within {limit:g} s", hung=True)
    return {name: found.get(name, late) for name in works}


def _do(name: str, work: Callable[[], object], done: dict[str, TimedOutcome]) -> None:
    try:
        done[name] = TimedOutcome(value=work(), trouble="", hung=False)
    except ShoalError as error:
        done[name] = TimedOutcome(value=None, trouble=f"{error.found}; {error.fix}", hung=False)
    except BaseException as error:  # a rank's trouble is a line of the report, whatever it is
        lines = str(error).splitlines() or [""]
        done[name] = TimedOutcome(
            value=None, trouble=f"{type(error).__name__}: {lines[0]}".rstrip(": "), hung=False
        )
