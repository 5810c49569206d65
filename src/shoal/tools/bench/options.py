"""Values of options: lists of names, numbers and message sizes, and limits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.util.arguments import check_choice, check_number
from shoal.util.errors import LaunchError
from shoal.util.units import binary_size

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_FACTOR = 4
_LARGEST = 1 << 40


def parse_words(text: str) -> tuple[str, ...]:
    """Return the words of a list with commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_choices(call: str, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a list. Raises LaunchError for one that is not known."""
    words = parse_words(text)
    for word in words:
        check_choice(LaunchError, call, option, word, known)
    return words


def parse_numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """Return the distinct numbers of a list, ascending. Raises LaunchError unless all are `least`, 0 or
    1, or more.
    """
    words = parse_words(text)
    if not all(word.isdecimal() and int(word) >= least for word in words):
        kind = "positive integers" if least else "integers of 0 or more"
        raise LaunchError(
            given=f"{option} {text}",
            found=f"not {kind}, separated by commas",
            fix=f"{option} 1,2,4",
        )
    return tuple(sorted({int(word) for word in words}))


def fill_places(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return words with the values for their names in braces."""
    found = []
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)  # noqa: PLW2901
        found.append(word)
    return found


def check_seconds(call: str, option: str, seconds: float) -> None:
    """Raise LaunchError for a time that is not above 0 and at most a day."""
    check_number(LaunchError, call, option, seconds, most=86400.0, above=True, usual=30.0)


def check_output(option: str, path: Path | None) -> None:
    """Raise LaunchError for the path of a directory, or of a file that the user can't write."""
    if path is None or (not path.is_dir() and os.access(path.parent, os.W_OK)):
        return
    if path.is_dir():
        found, fix = "it is a directory", f"{option} {path}/FILE"
    else:
        found = f"there is no directory {path.parent.absolute()} where you can write"
        fix = f"mkdir -p {path.parent}, or use another file"
    raise LaunchError(given=f"{option} {path}", found=found, fix=fix)


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
