"""Validated access to fields of events: a file may contain lines that no run has written."""

from __future__ import annotations

from shoal.tools.report.history import Event


def number_in(event: Event, name: str) -> float | None:
    """Return a field that is a finite number, or None."""
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return None
    return float(value)


def integer_in(event: Event, name: str) -> int | None:
    """Return a field that is an integer, or None."""
    value = event.get(name)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def text_in(event: Event, name: str) -> str:
    """Return a field that is a string, or an empty one, truncated to the length of a line."""
    value = event.get(name)
    return value[:500] if isinstance(value, str) else ""
