"""Stopping before the end because a signal, or a rank, asks for it: all ranks after the same tick.

Steps cost nothing more. A thread of each rank sleeps in a connection of its own to the store until
somebody asks. It then posts how many ticks this rank has begun, after which the main thread begins
one more at most and waits there. When all have posted, all stop after the largest number plus one.
The threads answer whatever the main threads are in: a forward, an evaluation, a save, a data loader.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.membership import LOOK_SECONDS
from shoal.distributed.world import World
from shoal.util.errors import LaunchError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to stop."""

ANSWER_SECONDS = 60.0
"""How long all ranks have to answer. It takes milliseconds, unless one holds Python's lock in C."""

_SLEEP = timedelta(days=1)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_JOIN_SECONDS = 5.0
_HINT = b"shoal: saving after this step; Ctrl-C again ends at once\n"
_CLEAR_LINE = b"\r\x1b[2K"
"""In a terminal the line of progress stands there, and is drawn again below."""

Kind = Literal["preempted", "interrupted", "failed"]
_CODES: dict[Kind, int] = {"preempted": REQUEUE, "interrupted": 128 + signal.SIGINT, "failed": 1}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a run stops: of what kind it is, what happened ("SIGTERM") and on which rank."""

    kind: Kind
    what: str
    rank: int

    @property
    def code(self) -> int:
        """The exit code that tells launchers."""
        return _CODES[self.kind]

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank}"


class Stopped(SystemExit):
    """Ends a process that has stopped, with the code of its reason; `except Exception` lets it pass."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.code)
        self.reason = reason


class Stopping:
    """Has all ranks of a world stop after the same tick, when one of SIGNALS or `request` asks for it.

    The main thread calls `due` once in each tick. A world of one needs neither store nor threads.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rank, self._size = world.rank, world.size  # those of the beginning: ranks may be lost
        survivors = world.membership.survivors
        self._members = range(world.size) if survivors is None else list(survivors.members)
        """The ranks by their first numbers: some may have been lost before this run."""
        self._pid = os.getpid()
        self._former: dict[int, Any] = {}
        self._requests: SimpleQueue[Reason | None] = SimpleQueue()
        self._shared: Store | None = None
        self._threads: list[threading.Thread] = []
        self._ticks = 0
        self._asked = False
        self._answered = False
        self._settled = threading.Event()
        self._reason: Reason | None = None
        self._last = 0
        self._error: LaunchError | None = None
        self._told = False
        self._stopped = False

    def start(self) -> None:
        """Listen to the other ranks and, in the main thread, handle signals. Collective.

        A handler of the user's own is called after Shoal's. A signal that is ignored stays ignored.
        """
        if self._size > 1:
            prefix = f"shoal/stopping/{self._world.broadcast(uuid.uuid4().hex)}"
            self._shared = self._world.store(prefix)
            for target in (self._listen, self._pass_on):
                thread = threading.Thread(target=target, args=(self._shared,), daemon=True)
                thread.start()
                self._threads.append(thread)
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                former = signal.getsignal(signum)
                if former not in (signal.SIG_IGN, None):
                    self._former[signum] = former
                    signal.signal(signum, self._handle)
        # A thread in a call of the store's, while the interpreter ends, would abort the process.
        atexit.register(self.stop)

    def request(self, what: str, *, kind: Kind = "preempted") -> None:
        """Have all ranks stop; from any rank and thread, and from signal handlers. The first counts."""
        reason = Reason(kind=kind, what=what, rank=self._rank)
        if self._size == 1:
            self._reason = self._reason or reason
        else:
            self._requests.put(reason)
        self._asked = True

    def due(self) -> Reason | None:
        """Why to stop in this tick; None to go on. Once asked it waits for the ranks to agree.

        Raises LaunchError where a rank doesn't answer, or the store is gone.
        """
        # First counted, then looked: `_agree` sets the mark first and then reads the count.
        self._ticks += 1
        if not self._asked:
            return None
        if self._reason is None:
            self._settled.wait()
        if self._error is not None:
            raise self._error
        if self._reason is None or self._ticks < self._last:
            return None
        self._told = True
        return self._reason

    def stop(self) -> None:
        """Handle signals no more and end the threads; twice is fine.

        When this rank has been told to stop, the process is ending, and schedulers repeat themselves:
        but for Ctrl-C, signals stay without effect.
        """
        if self._stopped or os.getpid() != self._pid:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        if threading.current_thread() is threading.main_thread():
            for signum, former in self._former.items():
                if signum == signal.SIGINT or not self._told:
                    signal.signal(signum, former)
        if self._shared is None:
            return
        self._requests.put(None)
        # The rank that holds the store may have gone.
        with suppress(RuntimeError):
            self._shared.set(self._wake(self._rank), "")
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        with suppress(RuntimeError):
            self._answer(self._shared, "")
        self._shared = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        former = self._former[signum]
        if os.getpid() != self._pid:
            # In a process that the rank has forked. What all processes of a job are sent is for the
            # rank to act upon; but it must be possible to end this one.
            if signum == signal.SIGTERM:
                signal.signal(signum, former)
                os.kill(os.getpid(), signum)
            return
        if self._stopped:
            return
        kind: Kind = "preempted"
        if signum == signal.SIGINT:
            kind = "interrupted"
            # A rank in a collective would not hear a handler in Python.
            signal.signal(signum, former if self._size == 1 else signal.SIG_DFL)
            if self._world.is_rank_zero:
                os.write(2, _CLEAR_LINE * os.isatty(2) + _HINT)
        self.request(signal.Signals(signum).name, kind=kind)
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)

    def _pass_on(self, store: Store) -> None:
        """Wait for a request on this rank; the first one of all ranks wakes them."""
        reason = self._requests.get()
        if reason is None:
            return
        text = json.dumps(asdict(reason))
        try:
            if store.compare_set("reason", "", text).decode() == text:
                for rank in range(self._size):
                    store.set(self._wake(rank), "asked")
        except RuntimeError as error:
            self._fail(error)

    def _listen(self, shared: Store) -> None:
        """Sleep until this rank is woken; where somebody has asked, agree on the tick."""
        wake = self._wake(self._rank)
        try:
            # Whoever waits in a connection keeps all others waiting who use it. It is made here, since
            # torch looks up names for it, which takes seconds where the name service stalls.
            store: Store = shared.clone()  # type: ignore[attr-defined]
            while not store.check([wake]):
                with suppress(DistStoreError):  # the time is up: it can't be infinite
                    store.wait([wake], _SLEEP)
            if store.get(wake):
                self._agree(store)
        except RuntimeError as error:
            self._fail(error)
        except LaunchError as error:
            self._error = error
        finally:
            self._settled.set()

    def _agree(self, store: Store) -> None:
        self._asked = True
        self._answer(store, str(self._ticks))
        now = time.monotonic()
        until, look, pause = now + ANSWER_SECONDS, now + LOOK_SECONDS, _FIRST_PAUSE
        while not store.check(["last"]):
            if self._stopped:
                return
            if time.monotonic() > until:
                raise self._silent(store)
            if time.monotonic() > look:
                look = time.monotonic() + LOOK_SECONDS
                self._pass_over(store)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        last = store.get("last")
        if last:
            self._last = int(last)
            self._reason = Reason(**json.loads(store.get("reason")))

    def _answer(self, store: Store, ticks: str) -> None:
        """Post, once, the ticks begun, "" where this rank ticks no more; the last to post concludes.

        Where one ticks no more nobody stops: all others end after the same tick too, or it has failed
        and couldn't save with them.
        """
        if self._answered:
            return
        self._answered = True
        store.set(self._at(self._rank), ticks)
        if store.add("answers", 1) == self._size:
            self._conclude(store, range(self._size))

    def _pass_over(self, store: Store) -> None:
        """Conclude without the ranks that have ended, where all others have answered."""
        survivors = self._world.membership.survivors
        missing = self._missing(store) if survivors is not None else []
        asked = [self._members[rank] for rank in missing]
        if survivors is not None and missing and survivors.gone(asked).issuperset(asked):
            self._conclude(store, [rank for rank in range(self._size) if rank not in missing])

    def _conclude(self, store: Store, ranks: Sequence[int]) -> None:
        posts = store.multi_get([self._at(rank) for rank in ranks])
        store.set("last", str(max(map(int, posts)) + 1) if all(posts) else "")

    def _missing(self, store: Store) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._size) if not store.check([self._at(rank)])]

    def _silent(self, store: Store) -> LaunchError:
        silent = self._missing(store)
        names = ", ".join(map(str, silent[:5])) + ", …" * (len(silent) > 5)
        return LaunchError(
            given=f"{Reason(**json.loads(store.get('reason')))}: all ranks stop after the same step",
            found=f"rank {names} of {self._size} did not answer within {ANSWER_SECONDS:g} s",
            fix="see that rank's own error; the same command goes on from the newest checkpoint",
        )

    def _fail(self, error: RuntimeError) -> None:
        self._error = LaunchError(
            given="a request to stop, on which ranks agree through the store of rank 0 or its launcher",
            found=f"it can't be reached any more: {str(error).splitlines()[0]}",
            fix="see rank 0's own error; the same command goes on from the newest checkpoint",
        )
        self._settled.set()

    @staticmethod
    def _wake(rank: int) -> str:
        return f"wake/{rank}"

    @staticmethod
    def _at(rank: int) -> str:
        return f"at/{rank}"
