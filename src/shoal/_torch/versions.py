"""The tested versions of torch, and the error if another one lacks a name."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from typing import Any

from shoal.util.errors import LaunchError

TESTED = ("2.11", "2.15")
"""The oldest and the newest tested torch."""


def is_newer_than_tested(torch: str) -> bool:
    """Return whether this version of torch is newer than all that were tested."""
    return _numbers(torch) > _numbers(TESTED[1])


def required(owner: Any, name: str, feature: str) -> Any:
    """Return the attribute `name` of `owner`. Raise LaunchError for `feature` if torch lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _lacking(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", feature) from None


def imported(module: str, name: str, feature: str) -> Any:
    """Return `name` of a private module of torch. Raise LaunchError as `required` does."""
    try:
        return required(import_module(module), name, feature)
    except ImportError:
        raise _lacking(f"{module}.{name}", feature) from None


def _lacking(name: str, feature: str) -> LaunchError:
    return LaunchError(
        given=f"torch {version('torch')}",
        found=f"it has no {name}, which {feature} needs",
        fix=f"install a torch that was tested: pip install 'torch=={TESTED[1]}.*'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
