"""The page in a terminal and its keys; drawn once a second, at each key, after each change of size."""

from __future__ import annotations

import os
import re
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TextIO

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from shoal.tools.report.dashboard.layout import count_turns, dashboard_lines
from shoal.tools.report.dashboard.snapshot import OVER, RunStatus, Snapshot
from shoal.tools.report.dashboard.snapshot_builder import SnapshotBuilder
from shoal.tools.report.dashboard.theme import TerminalStyle
from shoal.util.clock import CLOCK

Key = Literal["leave", "down", "up", "home", "end"]

KEYS: dict[bytes, Key] = {
    **dict.fromkeys((b"q", b"Q", b"\x04"), "leave"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"\x1b[6~", b"j", b" "), "down"),
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"\x1b[5~", b"k"), "up"),
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"g"), "home"),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"G"), "end"),
}

_PRESSED = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


def parse_keys(typed: bytes) -> list[Key]:
    """Return the keys with a meaning in the bytes typed."""
    return [KEYS[each] for each in _PRESSED.findall(typed) if each in KEYS]


SECONDS = 1.0
"""Seconds between looks at the run; longer if a look takes long, so that looks cost a fifth at most."""
PLAIN_LINES = 30
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these sequences show only complete frames; others ignore them."""
LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HEARD = (*LEFT, signal.SIGTSTP, signal.SIGWINCH)


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
        return _Screen(observer, console, look, run).stay()
    try:
        return _print(observer, console, look, every)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


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


class _Screen:
    """The live page, from its first frame to its last.

    Signals, keys and snapshots wait in one queue, so that none arrives in the middle of a frame, and a
    slow file system delays no key.
    """

    def __init__(
        self, observer: SnapshotBuilder, console: Console, look: TerminalStyle, run: str
    ) -> None:
        self._observer = observer
        self._console = console
        self._look = look
        self._leaf = 0
        self._typed = os.isatty(0)
        self._snapshot = Snapshot(run=run, clock="", state=RunStatus(kind="reading"))
        self._told: SimpleQueue[object] = SimpleQueue()

    def stay(self) -> int:
        """Show the page until the user quits, and return the exit code."""
        for work in (self._read_run, self._read_keys):
            threading.Thread(target=work, name="shoal-watch", daemon=True).start()
        while True:
            with self._taken():
                code = self._answer()
            if code is not None:
                return code
            signal.raise_signal(signal.SIGTSTP)  # give the terminal back to the shell, until fg

    def _read_run(self) -> None:
        while True:
            begun = CLOCK.now()
            try:
                self._told.put(self._observer.look())
            except Exception as error:  # raised by the page's own thread
                self._told.put(error)
                return
            CLOCK.sleep(max(SECONDS, 4 * (CLOCK.now() - begun)))

    def _read_keys(self) -> None:
        if self._typed:
            with suppress(OSError):  # the terminal is gone
                while typed := os.read(0, 4096):
                    for key in parse_keys(typed):
                        self._told.put(key)
            self._told.put("leave")

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Take the terminal: signals, keys as they are pressed, and the screen; give all of it back."""
        heard = {each: signal.signal(each, lambda number, _: self._told.put(number)) for each in HEARD}
        mode = termios.tcgetattr(0) if self._typed else None
        try:
            if mode is not None:
                tty.setcbreak(0)
            with self._console.screen():
                yield
        finally:
            if mode is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, mode)
            for each, handler in heard.items():
                signal.signal(each, handler)

    def _answer(self) -> int | None:
        """Draw and react until the user quits, or return None if the user suspends the page."""
        while True:
            if self._told.empty():
                self._draw()
            match self._told.get():
                case Exception() as error:
                    raise error
                case Snapshot() as snapshot:
                    self._snapshot = snapshot
                case signal.SIGTSTP:
                    return None
                case int() as number if number in LEFT:
                    return 128 + number
                case "leave":
                    return 0
                case str() as key:
                    self._turn(key)

    def _turn(self, key: str) -> None:
        """Turn to another page of the ranks; there is none beyond the first and the last."""
        moves = {"down": self._leaf + 1, "up": self._leaf - 1, "home": 0}
        last = count_turns(self._snapshot, *self._size(), self._look)
        self._leaf = min(max(0, moves.get(key, last)), last)

    def _draw(self) -> None:
        """Draw one frame over the one before without clearing, so that nothing flickers."""
        self._console.size = self._size()
        lines = dashboard_lines(
            self._snapshot, *self._console.size, self._look, leaf=self._leaf, keys=True
        )
        self._console.file.write(BEGIN_FRAME)
        self._console.update_screen(_block(lines))
        self._console.file.write(END_FRAME)
        self._console.file.flush()

    def _size(self) -> ConsoleDimensions:
        # Not COLUMNS and LINES, which are not updated.
        width, height = os.get_terminal_size(self._console.file.fileno())
        return ConsoleDimensions(width or 80, height or 24)
