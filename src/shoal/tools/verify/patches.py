"""Functions and methods that are replaced by ones which observe their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def call_around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function: `call` gets the original and the arguments, and returns the result."""
    original = getattr(owner, name)

    @wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        return call(original, *arguments, **named)

    setattr(owner, name, function)


def call_before(owner: Any, name: str, call: Callable[..., object]) -> None:
    """Call `call` with the arguments of a function before each of its calls."""

    def both(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        call(*arguments, **named)
        return original(*arguments, **named)

    call_around(owner, name, both)


def call_after(owner: Any, name: str, call: Callable[..., object]) -> None:
    """Call `call` with the positional arguments of a method after each of its calls.

    It is called by the function that replaces the method.
    """
    original = getattr(owner, name)

    @wraps(original)
    def method(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        call(*arguments)
        return result

    setattr(owner, name, method)
