"""The agreement of the ranks to record a window of steps on request, while the run is active."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from shoal.telemetry.profiler.window import Window, WindowRequest, read_request, remove_request

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
