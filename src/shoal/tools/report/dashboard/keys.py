"""Keys and their meanings."""

from __future__ import annotations

import re
from typing import Literal

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
