"""Numbers as people say them."""

from __future__ import annotations


def percent(share: float) -> str:
    """A share of one: `19 %`."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """A length of time in three digits, from microseconds to days."""
    if seconds >= 120:
        for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
            if seconds >= 2 * length:
                count = seconds / length
                return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{max(0.0, seconds) * 1e6:.3g} µs"


def bandwidth(bytes_per_second: float) -> str:
    """Bytes per second in powers of ten, with three digits: `4.98 MB/s`."""
    for unit, size in (("kB/s", 1e3), ("MB/s", 1e6)):
        if bytes_per_second < 999.5 * size:
            return f"{_three(bytes_per_second / size)} {unit}"
    return f"{_three(bytes_per_second / 1e9)} GB/s"


def _three(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
