"""A decision that Shoal took by itself: what it chose, why, and what it passed over and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

GIVEN = "given"
"""The reason, or how it begins, where the user has chosen: by an argument or by a variable."""


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[T_co]):
    """What was decided, the value, the reason, and what was rejected with the reason for each.

    It is made where the decision is made. A choice of the user's has "given" as its reason, or,
    by a variable of the environment, "given: NAME=value".

        >>> Decision(what="backend", value="gloo", reason="the device is a CPU").value
        'gloo'
    """

    what: str
    value: T_co
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict, hash=False)
