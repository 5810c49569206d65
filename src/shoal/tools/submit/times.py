"""Durations as users write them, for all schedulers, and GPU-hours."""

from __future__ import annotations

import re

from shoal.util.errors import LaunchError

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_CLOCK = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?")


def parse_time(text: str, option: str = "--time") -> int:
    """Return the seconds of `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`.

    Raises LaunchError for any other string and for a time of zero.
    """
    seconds = None
    if found := _DAYS.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif found := _CLOCK.fullmatch(text):
        parts = [int(part) for part in found.groups() if part is not None]
        hours, minutes, rest = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
        seconds = (hours * 60 + minutes) * 60 + rest
    if not seconds:
        raise LaunchError(
            given=f"{option} {text}",
            found="it is not a duration",
            fix=f"write hours, minutes and seconds, as in `{option} 20:00:00`, or days, as in "
            f"`{option} 2-12`",
        )
    return seconds


def spell_time(seconds: int) -> str:
    """Return seconds as `HH:MM:SS`; hours may be more than a day's."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def gpu_hours(gpus: int, seconds: int) -> str:
    """Return the GPU-hours of GPUs that are reserved for some seconds, as centres account for them."""
    hours = gpus * seconds / 3600
    return f"{hours:,.0f} GPU-hours" if hours >= 10 else f"{hours:.3g} GPU-hours"
