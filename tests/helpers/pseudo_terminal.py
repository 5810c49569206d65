"""A terminal for tests: a command on a pseudo-terminal of a given size, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyte

LINES = 50
SECONDS = 120.0


@dataclass(frozen=True)
class Shown:
    """How a command ended, every screen that was seen on the way, and the last one, without blanks."""

    code: int
    screens: list[list[str]]
    written: bytes
    cursor: tuple[int, bool]
    """Its column, and whether it is visible."""

    @property
    def last(self) -> list[str]:
        return self.screens[-1]


def on_terminal(
    command: Sequence[str],
    columns: int,
    *,
    variables: dict[str, str] | None = None,
    react: Callable[[subprocess.Popen[bytes], list[str]], None] | None = None,
) -> Shown:
    """Run `command` on a terminal; `react` is told of each screen while it runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    hidden = {"NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = kept | {"TERM": "xterm-256color"} | (variables or {})
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    screens, written = [_text(screen)], b""
    deadline = time.monotonic() + SECONDS
    try:
        while piece := _read(ours, deadline):
            written += piece
            for drawn in re.split(rb"(?=\r)", piece):  # one line at a time, however many came together
                stream.feed(drawn)
                screens.append(_text(screen))
            if react is not None:
                react(process, screens[-1])
        code = process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return Shown(code, screens, written, (screen.cursor.x, not screen.cursor.hidden))


def _read(terminal: int, deadline: float) -> bytes:
    """What comes next; nothing once the other side is closed."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
    assert ready, f"nothing was written in {SECONDS} s, and nothing has ended"
    try:
        return os.read(terminal, 4096)
    except OSError:  # what Linux answers there
        return b""


def _text(screen: pyte.Screen) -> list[str]:
    return [line.rstrip() for line in screen.display if line.strip()]
