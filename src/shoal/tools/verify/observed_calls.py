"""Observation of a process by hooks on functions: calls, files that are replaced, clipped gradients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

Written = Callable[[str], None]
CACHES = ("__pycache__", ".lock")
"""Parts of the names of files that ranks may share."""
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def call_before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call` with the arguments of a function before each of its calls."""
    original = getattr(owner, name)

    @wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        call(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, function)


def call_after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call` with the positional arguments of a function after each of its calls."""
    original = getattr(owner, name)

    @wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        call(*arguments)
        return result

    setattr(owner, name, function)


def observe_written_files(root: str, written: Written) -> None:
    """Call `written` with the path, relative to `root`, of each file that this process replaces.

    A file is replaced if it is opened with truncation, if another file is renamed to its name, or by
    torch's `save`, which writes in C++. Files that are appended to or created exclusively are not.
    """

    def note(path: Any) -> None:
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return  # a file descriptor, or a file that is open already
        if full.startswith(os.path.join(root, "")) and not any(part in full for part in CACHES):
            written(os.path.relpath(full, root))

    def audited(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & os.O_TRUNC and not values[2] & (os.O_APPEND | os.O_EXCL):
            note(values[0])
        elif event == "os.rename":  # os.replace raises it too
            note(values[1])

    sys.addaudithook(audited)
    call_before(torch, "save", lambda obj=None, f=None, *_, **__: note(f))


def observe_clipping(clipped: Callable[[list[Tensor]], None]) -> None:
    """Call `clipped` with the parameters before each call that clips their gradients."""
    for name in CLIPS:
        observed = _clipping(getattr(clip_grad, name), clipped)
        for module in (torch.nn.utils, clip_grad):
            setattr(module, name, observed)


def _clipping(
    original: Callable[..., Any], clipped: Callable[[list[Tensor]], None]
) -> Callable[..., Any]:
    @wraps(original)
    def function(parameters: Any, *arguments: Any, **named: Any) -> Any:
        # A list, since an iterator can be read only once.
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped(listed)
        return original(listed, *arguments, **named)

    return function


def reverse_listings() -> None:
    """Reverse the result of `os.listdir`, on which `Path.iterdir` and `shutil` are built.

    Scripts must not depend on the order of the file system.
    """
    original = os.listdir

    @wraps(original)
    def listdir(*arguments: Any) -> Any:
        return original(*arguments)[::-1]

    os.listdir = listdir  # type: ignore[assignment]
