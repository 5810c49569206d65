"""Durations, numbers, percentages and sizes in a readable form."""

from __future__ import annotations

import math
from collections.abc import Sequence


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a number and its noun: `1 worker`, `2 workers`; `4 processes` with the ending `es`."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}{ending}"


def first_few(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def percent(share: float, *, tenths: bool = False) -> str:
    """Return a fraction as a percentage: `19 %`; with `tenths` a small one has a decimal: `1.9 %`."""
    return f"{100 * share:.{1 if tenths and share < 0.0995 else 0}f} %"


def duration(seconds: float, *, fixed: bool = False, microseconds: bool = True) -> str:
    """Return a duration with three digits, from microseconds to days: `2.3 s`, `412 ms`, `75 s`.

    With `fixed`, trailing zeros stay, as columns of a table need it: `2.30 s`. Without `microseconds`,
    the smallest unit is the millisecond, for terminals that lack the `µ`.
    """
    if not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds >= 120:
        for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
            if seconds >= 2 * length:
                return f"{_digits(seconds / length, fixed)} {unit}"
    if seconds >= 0.9995:
        return f"{_digits(seconds, fixed)} s"
    if seconds >= 0.9995e-3 or not microseconds:
        return f"{_digits(seconds * 1e3, fixed)} ms"
    return f"{_digits(seconds * 1e6, fixed)} µs"


def elapsed(seconds: float) -> str:
    """Return a duration as a clock shows it: 0:07, 12:34, 3:25:45, 4d 03:25.

    A negative one, as after a clock was set back, is 0:00.
    """
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def age(seconds: float) -> str:
    """Return the age of an event, in full units: `59 s`, `3 min`, `2 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:,.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(count: float) -> str:
    """Return a number of bytes in powers of ten: `1.5 kB`, `64 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def binary_size(count: float) -> str:
    """Return a number of bytes in powers of 1024: `1.5 KiB`, `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def bandwidth(bytes_per_second: float) -> str:
    """Return bytes per second in powers of ten, with three digits: `4.98 MB/s`."""
    for unit, power in (("kB/s", 1e3), ("MB/s", 1e6)):
        if bytes_per_second < 999.5 * power:
            return f"{three_digits(bytes_per_second / power)} {unit}"
    return f"{three_digits(bytes_per_second / 1e9)} GB/s"


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all before the decimal point: `1.25`, `12.5`,
    `12,500`.
    """
    magnitude = abs(value)
    return f"{value:,.{2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0}f}"


def two_digits(value: float) -> str:
    """Return a number with two digits, or with all before the decimal point: `1.8`, `12`, `1,250`."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def four_digits(value: float) -> str:
    """Return a number with four digits, or with all before the decimal point: `0.1234`, `12,345`."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def compact(value: float) -> str:
    """Return a number in about six characters, for scales: `0.0123`, `412`, `12.3k`, `1.2e-05`."""
    if not math.isfinite(value):
        return "-"
    magnitude = abs(value)
    for unit, above in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if 0.9995 * above <= magnitude < 0.9995e12:
            return f"{value / above:.3g}{unit}"
    if magnitude and (magnitude < 1e-3 or magnitude >= 1e3):
        return f"{value:.1e}"
    return f"{value:.3g}"


def _digits(value: float, fixed: bool) -> str:
    if fixed:
        return three_digits(value)
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
