"""The window of steps to record, the paths of its files, and the requests in the run directory."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from shoal.util.errors import StepError

FOLDER = "traces"
FORMAT = 1
MARK = "shoal step "
"""Prefix of a step in the profiler's record; the number follows."""
MOST = 1000
"""Maximum number of steps of a window: each takes some hundred kB of memory until the last is over."""
_REQUEST = "request.json"


class Window(NamedTuple):
    """The steps from `first` to `last`, both of them included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_window(text: str, call: str) -> Window:
    """Read "first:last"; raise StepError if it is not a window. `call` is the user's command."""
    found = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if found is None:
        raise StepError(
            given=call,
            found=f"{text!r} is not the number of a first and a last step",
            fix="pass 100:105 for the steps from 100 to 105",
        )
    return check_window((int(found[1]), int(found[2])), call)


def check_window(steps: object, call: str) -> Window:
    """Return a window of steps that can be recorded; raise StepError for others."""
    match steps:
        case (int(first), int(last)) if 2 <= first <= last:
            return Window(first, last)
    raise StepError(
        given=call,
        found="a window has a first and a last step, from step 2 on: step 1 prepares, and its times "
        "differ from later steps",
        fix="pass profile=(100, 105) for the steps from 100 to 105",
    )


def check_length(window: Window, call: str) -> Window:
    """Return a window if it is not too long to be recorded, else raise StepError."""
    if window.last - window.first < MOST:
        return window
    raise StepError(
        given=call,
        found=f"{window.last - window.first + 1:,} steps, and the maximum is {MOST:,}: the record "
        "stays in memory until the last step is over",
        fix=f"record only a few: {window.first}:{window.first + 5}",
    )


def trace_path(folder: Path, rank: int | str, window: Window) -> Path:
    """Return the path of a rank's record of a window."""
    return folder / f"rank-{rank}-{window.first}-{window.last}.json.gz"


class WindowRequest(NamedTuple):
    """A request for a window, with a unique name."""

    name: str
    window: Window


def write_request(run: Path, wanted: Window) -> None:
    """Write a request into a run's directory; it replaces an earlier one for other steps."""
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
    """Return the request in a folder of traces, if there is one that can be read."""
    try:
        found = json.loads((folder / _REQUEST).read_bytes())
        name, steps = found["name"], (found["first"], found["last"])
        wanted = check_length(check_window(steps, _REQUEST), _REQUEST)
        return WindowRequest(name, wanted) if re.fullmatch("[0-9a-f]+", name) else None
    except (OSError, ValueError, TypeError, KeyError, StepError):
        return None


def remove_request(folder: Path, done: WindowRequest) -> None:
    """Remove a request, unless another one has replaced it."""
    if read_request(folder) in (None, done):
        (folder / _REQUEST).unlink(missing_ok=True)


_PATIENCE = timedelta(seconds=60)


class Requests:
    """The windows that the ranks agree to record, although each sees a request at another time.

    A thread of each rank looks for a request, and reports that the rank is ready if its steps have not
    reached the window yet. Rank 0 does so first, since the others wait for its decision. At the step
    before the window, rank 0 knows whether all are ready, and decides.
    """

    def __init__(self, folder: Path, *, store: Store | None, rank: int, size: int) -> None:
        self._folder = folder
        self._store = store
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._done = 0
        self._wish: WindowRequest | None = None
        self._seen = ""

    def look(self) -> None:
        """Look for a request; a thread calls it periodically."""
        wish = read_request(self._folder)
        if wish is None or wish.name == self._seen:
            return
        store = self._store
        if store is not None and self._rank and not store.check([f"{wish.name}/ready"]):
            return
        with self._lock:  # the main thread must not pass the beginning in between
            if self._wish is not None:
                return  # one window at a time
            late = self._done >= wish.window.first - 1
            self._seen = wish.name
            self._wish = None if late else wish
        if late:
            self._forget(wish)
            return
        if store is not None:
            store.add(f"{wish.name}/ready", 1)

    def due(self, step: int) -> tuple[Window, bool] | None:
        """Return a window that begins after this step, and whether all ranks are ready to record it."""
        with self._lock:
            self._done, wish = step, self._wish
            if wish is None or step < wish.window.first - 1:
                return None
            self._wish = None
        ready = self._decide(wish, self._store)
        self._forget(wish)
        return wish.window, ready

    def _forget(self, wish: WindowRequest) -> None:
        if self._rank == 0:
            remove_request(self._folder, wish)

    def _decide(self, wish: WindowRequest, store: Store | None) -> bool:
        if store is None:
            return True
        key = f"{wish.name}/go"
        if self._rank == 0:
            ready = store.add(f"{wish.name}/ready", 0) == self._size
            store.set(key, "yes" if ready else "no")
            return bool(ready)
        try:
            store.wait([key], _PATIENCE)
        except DistStoreError:
            return False
        return bool(store.get(key) == b"yes")
