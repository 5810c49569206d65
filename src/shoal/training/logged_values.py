"""Numbers by name, as a Run records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.util.errors import StepError
from shoal.util.text import shown


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of `world.log` as floats. Raises StepError for anything else."""
    call, fix = f"world.log({shown(values)})", 'world.log({"loss": 0.5})'
    check_names(values, call=call, fix=fix)
    found = {}
    for name, value in values.items():
        several = isinstance(value, Tensor) and value.numel() != 1
        try:
            if isinstance(value, str) or several:
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError):
            what = f"a tensor of {value.numel()} elements" if several else shown(repr(value))
            raise StepError(given=call, found=f"{name!r} is {what}, not a number", fix=fix) from None
    return found


def check_trackers(trackers: Any) -> None:
    """Raise StepError if trackers are not a sequence of objects that a run can open."""
    several = isinstance(trackers, Sequence) and not isinstance(trackers, str)
    if trackers is None or (several and all(hasattr(each, "open") for each in trackers)):
        return
    raise StepError(
        given=f"shoal.Run(…, trackers={trackers!r})",
        found="trackers is a sequence of trackers",
        fix="trackers=(shoal.TensorBoard(),), or () for none",
    )


def check_names(values: object, *, call: str, fix: str) -> None:
    """Raise StepError if values are not a dict with texts as names."""
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        found = f"{article} {kind}, not a dict of values by name"
        raise StepError(given=call, found=found, fix=fix)
    for name in values:
        if not isinstance(name, str):
            raise StepError(given=call, found=f"{name!r} is not a name", fix=fix)
