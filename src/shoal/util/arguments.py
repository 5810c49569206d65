"""Checks of the values that users pass, and the errors for those that do not fit.

Each check takes the class of its error, the `call` and the `name` of the argument, which may be an
option of a command, and the value. The error shows them as the user wrote them, the values that fit,
and one to pass; `fix` replaces the last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import TypeGuard

from shoal.util.errors import ShoalError


def is_integer(value: object, *, least: float = 0) -> TypeGuard[int]:
    """Return whether a value is an integer of at least `least`; not for booleans."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    return operator.index(value) >= least


def integer_like(value: object, default: int) -> int:
    """Return the integer that 3.0 or "3" means, to show in a fix; else `default`."""
    if isinstance(value, str) and value.isdecimal() and int(value):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and value > 0 else default


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite integer or float; booleans are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_choice(
    error: type[ShoalError],
    call: str,
    name: str,
    value: object,
    choices: Collection[object],
    *,
    fix: str = "",
) -> None:
    """Raise `error` unless `value` is one of `choices`, and show the most similar one, or the first."""
    if value not in tuple(choices):  # the value may have no hash
        option = name.startswith("-")
        listed = ", ".join(str(each) if option else repr(each) for each in choices)
        near = get_close_matches(str(value), [each for each in choices if isinstance(each, str)], 1)
        raise _unfit(error, call, name, value, f"one of {listed}", [*near, *choices][0], fix)


def check_integer(
    error: type[ShoalError],
    call: str,
    name: str,
    value: object,
    least: float = 0,
    *,
    most: int | None = None,
    usual: int | None = None,
    fix: str = "",
) -> int:
    """Return `value` if it is an integer from `least` to `most`. Raise `error` if not.

    A limit of 64 bits goes without saying.
    """
    if is_integer(value, least=least) and (most is None or value <= most):
        return operator.index(value)
    limits = f" from {least} to {most}" if most is not None else f", {least} or more"
    whole = integer_like(value, int(max(0, least)) if usual is None else usual)
    raise _unfit(error, call, name, value, f"an integer{limits * (least > -(2**63))}", whole, fix)


def check_number(
    error: type[ShoalError],
    call: str,
    name: str,
    value: object,
    least: float = 0.0,
    *,
    most: float = math.inf,
    above: bool = False,
    usual: float = 1.0,
    fix: str = "",
) -> None:
    """Raise `error` unless `value` is a finite number from `least`, or `above` it, to `most`."""
    if not is_number(value) or not least <= value <= most or (above and value == least):
        limits = f"above {least:.12g}" if above else f"of at least {least:.12g}"
        limits += f" and at most {most:.12g}" if most < math.inf else ""
        raise _unfit(error, call, name, value, f"a number {limits}", usual, fix)


def check_file(error: type[ShoalError], given: str, path: Path | str, *, fix: str) -> None:
    """Raise `error` unless there is a file at `path`."""
    whole = Path(path).absolute()
    if not whole.is_file():
        found = f"{whole} is a directory" if whole.is_dir() else f"there is no file {whole}"
        raise error(given=given, found=found, fix=fix)


def _unfit(
    error: type[ShoalError], call: str, name: str, value: object, what: str, usual: object, fix: str
) -> ShoalError:
    option = name.startswith("-")
    written = "{} {:.12g}" if option and isinstance(value, float) else "{} {}" if option else "{}={!r}"
    given, better = (written.format(name, it) for it in (value, usual))
    if call:
        given = f"{call} {given}" if option else f"{call}({given})"
    return error(given=given, found=f"{name} is {what}", fix=fix or f"pass {better}")
