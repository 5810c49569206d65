"""Sizes, times and rates as people write and read them."""

from __future__ import annotations

import re

from shoal.util.errors import LaunchError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_FACTOR = 4
_LARGEST = 1 << 40


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes, ascending: `1KiB,1MiB`, or `1KiB:64MiB` for every fourth power of two between.

    Units are powers of 1024. Raises LaunchError for what is no size, 0 among them.
    """
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        size, end = _size(first, text), _size(last if colon else first, text)
        if end < size:
            raise _wrong(text, f"{first.strip()} is more than {last.strip()}")
        while size < end:
            found.append(size)
            size *= _FACTOR
        found.append(end)
    return tuple(sorted(set(found)))


def _size(text: str, given: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _wrong(given, f"{text.strip()!r} is no size")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < size <= _LARGEST:
        raise _wrong(given, f"{text.strip()!r} is not between 1 byte and {shown_size(_LARGEST)}")
    return size


def _wrong(given: str, found: str) -> LaunchError:
    return LaunchError(
        given=f"--sizes {given}",
        found=found,
        fix="--sizes 1KiB:64MiB, or some of your choice: --sizes 4KiB,1MiB",
    )


def shown_size(count: float) -> str:
    """Bytes in powers of 1024, as sizes of messages are said."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def duration(seconds: float) -> str:
    """A short time with three digits: `4.41 µs`, `18.5 ms`, `2.30 s`, `75 s`."""
    for unit, length in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * length:
            return f"{_three(seconds / length)} {unit}"
    return f"{_three(seconds)} s"


def percent(share: float) -> str:
    """A share in percent; tenths where it is small."""
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def times(ratio: float) -> str:
    """How many times as many: `1.8`, `12`, `1,250`."""
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.2g}"


def _three(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
