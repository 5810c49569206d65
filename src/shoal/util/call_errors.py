"""Errors of calls with arguments that a function does not have, or without some that it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType
from typing import Any

from shoal.util.errors import ShoalError

_OTHER_NAMES = {
    "accumulate_grad_batches": "micro_batches",
    "gradient_accumulation_steps": "micro_batches",
    "gradient_clip_val": "clip",
    "lr_scheduler": "schedule",
    "max_grad_norm": "clip",
    "mixed_precision": "precision",
    "sampler": "order",
}
"""Arguments by their names in other tools, if those are not similar."""


def explain_calls(found: Any, name: str) -> Any:
    """Return a public object that raises ShoalError in place of TypeError for wrong arguments.

    A function is wrapped. A class stays the same object, and its `__init__` is wrapped.
    """
    if isinstance(found, FunctionType):
        return _explained(found, name)
    if isinstance(found, type) and "__init__" in vars(found):
        found.__init__ = _explained(found.__init__, name)  # type: ignore[misc]
    return found


def _explained(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # inside of the function
            raise _wrong_call(function, name, args, named) from None

    return call


def _wrong_call(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], named: dict[str, Any]
) -> ShoalError:
    """Return the error of a call that does not fit, with the arguments to pass."""
    import inspect  # a fifth of the time of `import shoal`

    signature = inspect.signature(function)
    known = [each for each in signature.parameters.values() if each.name != "self"]
    names = [each.name for each in known]
    unknown = [each for each in named if each not in names]
    found = [f"there is no argument {each}" for each in unknown]
    try:
        signature.bind(*args, **{key: value for key, value in named.items() if key in names})
    except TypeError as error:
        found.append(str(error))
    near = [_OTHER_NAMES.get(key) or "".join(get_close_matches(key, names, 1)) for key in unknown]
    needed = [each for each in known if each.default is each.empty or each.name in near]
    positional = "…" if len(args) > len(signature.parameters) - len(known) else ""
    fix = (each.name if each.kind != each.KEYWORD_ONLY else f"{each.name}=…" for each in needed)
    return ShoalError(
        given=f"{name}({', '.join([*filter(None, [positional]), *(f'{key}=…' for key in named)])})",
        found=f"{'; '.join(found)}; the arguments are {', '.join(names)}",
        fix=f"{name}({', '.join(fix)})",
    )
