"""Which steps are to be recorded, and where; the request that somebody leaves to a run under way."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from shoal.util.errors import StepError

FOLDER = "traces"
FORMAT = 1
MARK = "shoal step "
"""How the profiler's record names a step; then comes its number."""
MOST = 1000
"""Steps that may be recorded at a time: each takes some hundred kB of memory until the last is over."""
_REQUEST = "request.json"


class Window(NamedTuple):
    """The steps from `first` to `last`, both of them included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_window(text: str, call: str) -> Window:
    """Read "first:last"; StepError where that is none. `call` is what somebody typed."""
    found = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if found is None:
        raise StepError(
            given=call,
            found=f"{text!r} is not the numbers of a first and a last step",
            fix="100:105, for the steps from 100 to 105",
        )
    return check_window((int(found[1]), int(found[2])), call)


def check_window(steps: object, call: str) -> Window:
    """A window of steps that can be recorded, else StepError."""
    match steps:
        case (int(first), int(last)) if 2 <= first <= last:
            return Window(first, last)
    raise StepError(
        given=call,
        found="steps are recorded from the second one on, and from a first to a last one: the first "
        "step prepares, and its times say nothing of those after it",
        fix="profile=(100, 105), for the steps from 100 to 105",
    )


def check_length(window: Window, call: str) -> Window:
    """A window that is not too long to be recorded, else StepError."""
    if window.last - window.first < MOST:
        return window
    raise StepError(
        given=call,
        found=f"{window.last - window.first + 1:,} steps, and {MOST:,} are the most: what is recorded "
        "stays in memory until the last is over",
        fix=f"a few are enough: {window.first}:{window.first + 5}",
    )


def trace_path(folder: Path, rank: int | str, window: Window) -> Path:
    """Where a rank's record of a window is."""
    return folder / f"rank-{rank}-{window.first}-{window.last}.json.gz"


class WindowRequest(NamedTuple):
    """A wish for a window, with a name of its own."""

    name: str
    window: Window


def write_request(run: Path, wanted: Window) -> None:
    """Leave a request in a run's directory, in the place of one for other steps."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    there = read_request(folder)
    if there is not None and there.window == wanted:
        return
    wish = {"name": secrets.token_hex(8), "first": wanted.first, "last": wanted.last}
    part = folder / f"{_REQUEST}.{os.getpid()}"
    part.write_text(json.dumps(wish))
    part.replace(folder / _REQUEST)


def read_request(folder: Path) -> WindowRequest | None:
    """The request in a folder of traces, if there is one that can be read."""
    try:
        found = json.loads((folder / _REQUEST).read_bytes())
        name, steps = found["name"], (found["first"], found["last"])
        wanted = check_length(check_window(steps, _REQUEST), _REQUEST)
        return WindowRequest(name, wanted) if re.fullmatch("[0-9a-f]+", name) else None
    except (OSError, ValueError, TypeError, KeyError, StepError):
        return None


def remove_request(folder: Path, done: WindowRequest) -> None:
    """Remove a request, unless another one has taken its place."""
    if read_request(folder) in (None, done):
        (folder / _REQUEST).unlink(missing_ok=True)
