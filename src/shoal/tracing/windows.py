"""Which steps are to be recorded, and where; how somebody asks a run for it that is under way."""

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

from shoal.errors import StepError

FOLDER = "traces"
_REQUEST = "request.json"
_PATIENCE = timedelta(seconds=60)


class Window(NamedTuple):
    """The steps from `first` to `last`, both of them included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def window(text: str, call: str) -> Window:
    """Read "first:last"; StepError where that is none. `call` is what somebody typed."""
    found = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if found is None:
        raise StepError(
            given=call,
            found=f"{text!r} is not the numbers of a first and a last step",
            fix="100:105, for the steps from 100 to 105",
        )
    return checked((int(found[1]), int(found[2])), call)


def checked(steps: object, call: str) -> Window:
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


class Request(NamedTuple):
    """A wish for a window, with a name of its own."""

    name: str
    window: Window


def ask(run: Path, wanted: Window) -> None:
    """Leave a request in a run's directory, in the place of one for other steps."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    there = asked(folder)
    if there is not None and there.window == wanted:
        return
    wish = {"name": secrets.token_hex(8), "first": wanted.first, "last": wanted.last}
    part = folder / f"{_REQUEST}.{os.getpid()}"
    part.write_text(json.dumps(wish))
    part.replace(folder / _REQUEST)


def asked(folder: Path) -> Request | None:
    """The request in a folder of traces, if there is one that can be read."""
    try:
        found = json.loads((folder / _REQUEST).read_bytes())
        name, steps = found["name"], (found["first"], found["last"])
        return Request(name, checked(steps, _REQUEST)) if re.fullmatch("[0-9a-f]+", name) else None
    except (OSError, ValueError, TypeError, KeyError, StepError):
        return None


class Requests:
    """What the ranks of a run agree to record, though each sees a request at a time of its own.

    A thread of each rank looks for one, and says that it is ready if its steps have not come to the
    window yet; rank 0 first, since the others will wait for its word. At the step before the window
    rank 0 knows whether all are ready, and decides.
    """

    def __init__(self, folder: Path, *, store: Store | None, rank: int, size: int) -> None:
        self._folder = folder
        self._store = store
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._done = 0
        self._wish: Request | None = None
        self._seen = ""

    def look(self) -> None:
        """Look for a request; called by a thread, now and then."""
        wish = asked(self._folder)
        if wish is None or wish.name == self._seen:
            return
        store = self._store
        if store is not None and self._rank and not store.check([f"{wish.name}/ready"]):
            return
        self._seen = wish.name
        with self._lock:  # the main thread may not pass the beginning in between
            if self._wish is not None:
                return
            late = self._done >= wish.window.first - 1
            self._wish = None if late else wish
        if late:
            self._forget()
            return
        if store is not None:
            store.add(f"{wish.name}/ready", 1)

    def due(self, step: int) -> tuple[Window, bool] | None:
        """After each step: a window that begins now, and whether all ranks are ready to record it."""
        with self._lock:
            self._done, wish = step, self._wish
            if wish is None or step < wish.window.first - 1:
                return None
            self._wish = None
        ready = self._decide(wish, self._store)
        self._forget()
        return wish.window, ready

    def _forget(self) -> None:
        if self._rank == 0:
            (self._folder / _REQUEST).unlink(missing_ok=True)

    def _decide(self, wish: Request, store: Store | None) -> bool:
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
