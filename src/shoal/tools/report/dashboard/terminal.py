"""The page in a terminal, drawn once a second, at each key, and after each change of size."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.tools.report.dashboard.keys import Key, cbreak_mode, parse_keys
from shoal.tools.report.dashboard.layout import count_turns, dashboard_lines
from shoal.tools.report.dashboard.snapshot import OVER, RunStatus, Snapshot
from shoal.tools.report.dashboard.snapshot_builder import SnapshotBuilder
from shoal.tools.report.dashboard.theme import TerminalStyle
from shoal.util.clock import CLOCK

SECONDS = 1.0
"""Seconds between looks at the run; longer if a look takes long, so that looks cost a fifth at most."""
PLAIN_LINES = 30
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these sequences show only complete frames; others ignore them."""
LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HEARD = (*LEFT, signal.SIGTSTP, signal.SIGWINCH)
LEAVING = {int(each): 128 + each for each in LEFT}


def watch(run: str, *, out: TextIO, every: float | None = None, ascii_only: bool = False) -> int:
    """Show the state of a run until the user quits, and return the exit code.

    On a terminal it is a live page. Otherwise, if TERM is dumb or with `every` in seconds, it prints
    plain pages below each other: one page, or with `every` one after the other until the run has ended.

    Raises CheckpointError if there is no run and none is waited for.
    """
    live = every is None and out.isatty()
    console = Console(
        file=out,
        color_system="auto" if live else None,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=True if live else None,
        force_interactive=live,
    )
    live = live and not console.is_dumb_terminal
    colour = live and not console.no_color and console.color_system is not None
    look = (
        TerminalStyle(colour=colour, unicode=False)
        if ascii_only
        else TerminalStyle.of(out, colour=colour)
    )
    observer = SnapshotBuilder(Path(run), wait=live or every is not None)
    if live:
        return _Screen(observer, console, look, Path(run)).stay()
    try:
        return _print(observer, console, look, every)
    except KeyboardInterrupt:
        return LEAVING[signal.SIGINT]


def _print(
    observer: SnapshotBuilder, console: Console, look: TerminalStyle, every: float | None
) -> int:
    """Print plain pages until the run has ended and no preemption will restart it."""
    while True:
        snapshot = observer.look()
        lines = dashboard_lines(snapshot, console.width, PLAIN_LINES, look)
        console.print(_block(lines))
        if every is None or (snapshot.state.kind in OVER and snapshot.state.kind != "preempted"):
            return 0
        console.print()
        CLOCK.sleep(every)


def _block(lines: list[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


class _ReaderThread(threading.Thread):
    """A thread that reads the run, so that the page answers keys despite a slow file system."""

    def __init__(self, observer: SnapshotBuilder, seen: socket.socket) -> None:
        super().__init__(name="shoal-watch", daemon=True)
        self._observer = observer
        self._seen = seen
        self._ended = threading.Event()
        self.snapshot: Snapshot | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        while not self._ended.is_set():
            begun = CLOCK.now()
            try:
                self.snapshot = self._observer.look()
            except Exception as error:  # reported by the page's own thread
                self.error = error
                self._ended.set()
            with suppress(OSError):  # the page is closed, or has not yet handled the look before
                self._seen.send(b"\0")
            CLOCK.wait(self._ended, max(SECONDS, 4 * (CLOCK.now() - begun)))

    def end(self) -> None:
        """Stop looking, without waiting for a look in progress."""
        self._ended.set()


class _Screen:
    """The live page, from its first frame to its last."""

    def __init__(
        self, observer: SnapshotBuilder, console: Console, look: TerminalStyle, run: Path
    ) -> None:
        self._console = console
        self._look = look
        self._leaf = 0
        self._terminal = 0 if os.isatty(0) else None
        self._bell, seen = socket.socketpair()
        for end in (self._bell, seen):
            end.setblocking(False)
        self._seen = seen
        self._lookout = _ReaderThread(observer, seen)
        self._first = Snapshot(run=str(run), clock="", state=RunStatus(kind="reading"))

    def stay(self) -> int:
        """Show the page until the user quits, and return the exit code."""
        self._lookout.start()
        try:
            while True:
                with _signals(self._seen), cbreak_mode(self._terminal), self._drawn() as live:
                    code = self._answer(live)
                if code is not None:
                    return code
                signal.raise_signal(signal.SIGTSTP)  # give the terminal back to the shell, until fg
        finally:
            self._lookout.end()

    @contextmanager
    def _drawn(self) -> Iterator[Live]:
        live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with live:
            self._draw(live)
            yield live

    def _answer(self, live: Live) -> int | None:
        """Draw and react until the user quits, or return None if the user suspends the page."""
        watched = [self._bell.fileno()] + ([] if self._terminal is None else [self._terminal])
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._bell.fileno() in ready:
                for heard in self._bell.recv(4096):
                    if heard in LEAVING:
                        return LEAVING[heard]
                    if heard == signal.SIGTSTP:
                        return None
            if self._lookout.error is not None:
                raise self._lookout.error
            if self._terminal in ready:
                typed = os.read(self._terminal, 4096) if self._terminal is not None else b""
                if not typed or "leave" in (keys := parse_keys(typed)):
                    return 0
                for key in keys:
                    self._turn(key)
            self._draw(live)

    def _turn(self, key: Key) -> None:
        """Turn to another page of the ranks; there is none beyond the first and the last."""
        moves = {"down": self._leaf + 1, "up": self._leaf - 1, "home": 0}
        width, height = self._size()
        last = count_turns(self._snapshot, width, height, self._look)
        self._leaf = min(max(0, moves.get(key, last)), last)

    def _draw(self, live: Live) -> None:
        """Draw one frame over the one before without clearing, so that nothing flickers."""
        width, height = self._size()
        self._console.size = width, height
        lines = dashboard_lines(self._snapshot, width, height, self._look, leaf=self._leaf, keys=True)
        self._console.file.write(BEGIN_FRAME)
        live.update(_block(lines), refresh=True)
        self._console.file.write(END_FRAME)
        self._console.file.flush()

    @property
    def _snapshot(self) -> Snapshot:
        return self._lookout.snapshot or self._first

    def _size(self) -> tuple[int, int]:
        # Not COLUMNS and LINES, which are not updated.
        width, height = os.get_terminal_size(self._console.file.fileno())
        return width or 80, height or 24


@contextmanager
def _signals(told: socket.socket) -> Iterator[None]:
    """Send a byte to `told` for each signal, so that none arrives in the middle of a frame."""
    wakeup = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    before = {each: signal.signal(each, lambda *_: None) for each in HEARD}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(wakeup)
