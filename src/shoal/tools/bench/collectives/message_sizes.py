"""The message sizes of `--sizes`."""

from __future__ import annotations

import re

from shoal.util.errors import LaunchError
from shoal.util.units import binary_size

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_FACTOR = 4
_LARGEST = 1 << 40


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return sizes in bytes, ascending: `1KiB,1MiB` as they are, `1KiB:64MiB` by factors of 4.

    Units are powers of 1024. Raises LaunchError if a part is not a size, or is 0.
    """
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        count, end = _size(first, text), _size(last if colon else first, text)
        if end < count:
            raise _wrong(text, f"{first.strip()} is more than {last.strip()}")
        while count < end:
            found.append(count)
            count *= _FACTOR
        found.append(end)
    return tuple(sorted(set(found)))


def _size(text: str, given: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _wrong(given, f"{text.strip()!r} is not a size")
    count = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < count <= _LARGEST:
        raise _wrong(given, f"{text.strip()!r} is not between 1 byte and {binary_size(_LARGEST)}")
    return count


def _wrong(given: str, found: str) -> LaunchError:
    return LaunchError(
        given=f"--sizes {given}",
        found=found,
        fix="pass --sizes 1KiB:64MiB, or a list of sizes: --sizes 4KiB,1MiB",
    )
