"""Early stop of all ranks after the same tick, on a signal or at the request of one rank.

Steps cost no extra time. On each rank a thread waits on its own connection to the store for a
request. It then posts the number of ticks that this rank has begun, after which the main thread begins
at most one more and waits in it. When all ranks have posted, all stop after the largest number plus
one. The threads answer during a forward pass, an evaluation, a save or data loading of the main
threads.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
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
from shoal.util.clock import CLOCK, Clock
from shoal.util.errors import LaunchError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that stop a run."""

ANSWER_SECONDS = 60.0
"""Seconds in which all ranks must answer. It takes milliseconds unless C code holds the GIL."""

_SLEEP = timedelta(days=1)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_JOIN_SECONDS = 5.0
_HINT = b"shoal: saving after this step; Ctrl-C again ends at once\n"
_CLEAR_LINE = b"\r\x1b[2K"
"""Clears the progress bar in a terminal, which is drawn again below."""

Kind = Literal["preempted", "interrupted", "failed"]
_CODES: dict[Kind, int] = {"preempted": REQUEUE, "interrupted": 128 + signal.SIGINT, "failed": 1}


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """The reason of a stop: its kind, the event ("SIGTERM") and the rank."""

    kind: Kind
    what: str
    rank: int

    @property
    def code(self) -> int:
        """The exit code for the launcher."""
        return _CODES[self.kind]

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank}"


class StoppedExit(SystemExit):
    """Ends a stopped process with the exit code of its reason; `except Exception` does not catch it."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.code)
        self.reason = reason


class PreemptionHandler:
    """Stops all ranks of a World after the same tick, on one of SIGNALS or `request`.

    The main thread calls `due` once in each tick. A World of size 1 needs neither store nor threads.
    """

    def __init__(self, world: World, clock: Clock = CLOCK) -> None:
        self._world = world
        self._clock = clock
        self._rank, self._size = world.rank, world.size  # those of the beginning: ranks may be lost
        survivors = world.membership.survivors
        self._members = range(world.size) if survivors is None else list(survivors.members)
        """The original numbers of the ranks: some ranks may have been lost before this run."""
        self._pid = os.getpid()
        self._former: dict[int, Any] = {}
        self._requests: SimpleQueue[StopReason | None] = SimpleQueue()
        self._shared: Store | None = None
        self._threads: list[threading.Thread] = []
        self._ticks = 0
        self._asked = False
        self._answered = False
        self._settled = threading.Event()
        self._reason: StopReason | None = None
        self._last = 0
        self._error: LaunchError | None = None
        self._told = False
        self._stopped = False

    def start(self) -> None:
        """Listen to the other ranks and, in the main thread, handle signals. Collective.

        The user's handlers are called after Shoal's. An ignored signal stays ignored.
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
        # A thread that is still in a store call when the interpreter exits would abort the process.
        atexit.register(self.stop)

    def request(self, what: str, *, kind: Kind = "preempted") -> None:
        """Stop all ranks; callable on any rank and thread, and in signal handlers. The first counts."""
        reason = StopReason(kind=kind, what=what, rank=self._rank)
        if self._size == 1:
            self._reason = self._reason or reason
        else:
            self._requests.put(reason)
        self._asked = True

    def due(self) -> StopReason | None:
        """Return the reason to stop in this tick, or None to continue.

        After a request it waits until the ranks have agreed on a tick. Raises LaunchError if a rank
        doesn't answer or the store is gone.
        """
        # Count before the check: `_agree` sets the flag before it reads the count.
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
        """Restore the signal handlers and end the threads; a second call does nothing.

        If `due` has returned a reason, the process is about to exit, and schedulers may repeat the
        signal: all signals except Ctrl-C remain without effect.
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
            # In a process that the rank has forked. The rank handles signals to all processes of a
            # job; but SIGTERM must still end this process.
            if signum == signal.SIGTERM:
                signal.signal(signum, former)
                os.kill(os.getpid(), signum)
            return
        if self._stopped:
            return
        kind: Kind = "preempted"
        if signum == signal.SIGINT:
            kind = "interrupted"
            # Python handlers do not run while a rank is in a collective.
            signal.signal(signum, former if self._size == 1 else signal.SIG_DFL)
            if self._world.is_rank_zero:
                os.write(2, _CLEAR_LINE * os.isatty(2) + _HINT)
        self.request(signal.Signals(signum).name, kind=kind)
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)

    def _pass_on(self, store: Store) -> None:
        """Wait for a request on this rank; the first request of all ranks wakes every rank."""
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
        """Sleep until this rank is woken; after a request, agree on the tick."""
        wake = self._wake(self._rank)
        try:
            # A thread that waits on a connection blocks all its other users, so this one has its own.
            # It is made in this thread, since torch looks up host names, which can take seconds.
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
        now = self._clock.now()
        until, look, pause = now + ANSWER_SECONDS, now + LOOK_SECONDS, _FIRST_PAUSE
        while not store.check(["last"]):
            if self._stopped:
                return
            if self._clock.now() > until:
                raise self._silent(store)
            if self._clock.now() > look:
                look = self._clock.now() + LOOK_SECONDS
                self._pass_over(store)
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        last = store.get("last")
        if last:
            self._last = int(last)
            self._reason = StopReason(**json.loads(store.get("reason")))

    def _answer(self, store: Store, ticks: str) -> None:
        """Post the number of ticks begun, once, or "" after the last; the last rank to post concludes.

        If one rank posts "", no rank stops early: either all others end after the same tick too, or
        that rank has failed and could not save with them.
        """
        if self._answered:
            return
        self._answered = True
        store.set(self._at(self._rank), ticks)
        if store.add("answers", 1) == self._size:
            self._conclude(store, range(self._size))

    def _pass_over(self, store: Store) -> None:
        """Conclude without the ranks that have ended, if all others have answered."""
        survivors = self._world.membership.survivors
        missing = self._missing(store) if survivors is not None else []
        asked = [self._members[rank] for rank in missing]
        if survivors is not None and missing and survivors.gone(asked).issuperset(asked):
            self._conclude(store, [rank for rank in range(self._size) if rank not in missing])

    def _conclude(self, store: Store, ranks: Sequence[int]) -> None:
        posts = store.multi_get([self._at(rank) for rank in ranks])
        store.set("last", str(max(map(int, posts)) + 1) if all(posts) else "")

    def _missing(self, store: Store) -> list[int]:
        """Return the ranks that have not answered."""
        return [rank for rank in range(self._size) if not store.check([self._at(rank)])]

    def _silent(self, store: Store) -> LaunchError:
        silent = self._missing(store)
        names = ", ".join(map(str, silent[:5])) + ", …" * (len(silent) > 5)
        reason = StopReason(**json.loads(store.get("reason")))
        return LaunchError(
            given=f"{reason}: all ranks stop after the same step",
            found=f"rank {names} of {self._size} did not answer within {ANSWER_SECONDS:g} s",
            fix="see that rank's own error; the same command resumes from the latest complete "
            "checkpoint",
        )

    def _fail(self, error: RuntimeError) -> None:
        self._error = LaunchError(
            given="a request to stop, through the store of rank 0 or its launcher",
            found=f"the store can't be reached any more: {str(error).splitlines()[0]}",
            fix="see rank 0's own error; the same command resumes from the latest complete checkpoint",
        )
        self._settled.set()

    @staticmethod
    def _wake(rank: int) -> str:
        return f"wake/{rank}"

    @staticmethod
    def _at(rank: int) -> str:
        return f"at/{rank}"
