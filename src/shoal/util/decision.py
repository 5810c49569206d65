"""A decision that Shoal made: the value, the reason, and the rejected alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

GIVEN = "given"
"""The reason, or its beginning, if the user chose by an argument or an environment variable."""


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[T_co]):
    """One value that Shoal or the user chose, with its reason and the rejected alternatives.

    Args:
        what: Name of the decision, such as `"backend"`.
        value: The chosen value.
        reason: Reason for the value. `"given"` if the user passed an argument, and
            `"given: NAME=value"` if the user set an environment variable.
        rejected: Alternatives that were not chosen, each with its reason. Default: none.

    Examples:
        >>> shoal.Decision(what="backend", value="gloo", reason="the device is a CPU").value
        'gloo'
    """

    what: str
    value: T_co
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict, hash=False)
