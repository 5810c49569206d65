"""Values of JSON as dataclasses, checked against the types of their fields."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any, *, least: float = -math.inf, where: str = "") -> Any:
    """Return the dataclass that `to_plain` turned into these values. Unknown names are ignored.

    Raises ValueError, with the place of the value, if a field is missing or a value does not have its
    type, or for a number that is not finite or less than `least`.
    """
    convert, made = partial(from_plain, least=least), bool(is_dataclass(kind))
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else convert(of[0], value, where=where)
    if origin is tuple:
        _require(isinstance(value, list), f"{where} is not a list")
        return tuple(
            convert(of[0], each, where=f"{where}[{place}]") for place, each in enumerate(value)
        )
    if origin is Mapping or made:
        _require(isinstance(value, dict), f"{where} is not an object")
        hints = get_type_hints(kind) if made else dict.fromkeys(value, of[1])
        found, prefix = {}, where + "." * bool(where)
        for name, hint in hints.items():
            _require(name in value, f"{prefix}{name} is missing")
            found[name] = convert(hint, value[name], where=f"{prefix}{name}")
        return kind(**found) if made else found
    right = type(value) in ((int, float) if kind is float else (kind,))
    _require(right, f"{where} is {value!r:.60}, not {kind.__name__}")
    if kind in (int, float):
        bound = f" of at least {least:g}" if math.isfinite(least) else ""
        right = math.isfinite(value) and value >= least
        _require(right, f"{where} is {value!r}, not a finite number{bound}")
    return value


def _require(right: bool, problem: str) -> None:
    if not right:
        raise ValueError(problem)
