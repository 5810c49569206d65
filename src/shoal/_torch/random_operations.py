"""Interception of torch's random operations, ahead of the kernels that draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Instead = Callable[..., Any]
"""Called with `original`, a function without arguments that draws as torch does, and the arguments."""

_KEY = "BackendSelect"


def replace_draws(instead: Mapping[str, Instead]) -> bool:
    """Call `instead[name]` in place of the kernels of aten operations, for the rest of the process.

    Autograd runs before it. Tracing with fake tensors, as torch.compile does, bypasses it.
    Return False if this torch lacks a name for it, and nothing is intercepted.
    """
    keyset = getattr(torch._C, "_dispatch_keyset_full_after", None)
    if keyset is None:
        return False
    below = keyset(getattr(torch._C.DispatchKey, _KEY))
    # Graphs that run as they are, with backend="eager", would otherwise have torch compile the kernel.
    uncompiled: Any = torch.compiler.disable(_call)
    for name, call in instead.items():
        packet, _, overload = name.partition(".")
        kernel = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _LIBRARY.impl(name, partial(uncompiled, call, kernel, below), _KEY, with_keyset=True)
    return True


def replace_attention(instead: Instead, key: str = "AutogradCUDA") -> None:
    """Call `instead` in place of `scaled_dot_product_attention` on a device, for the whole process.

    `original` chooses one of torch's kernels, as torch does. Autograd runs in them, not before.
    """
    kernel = torch.ops.aten.scaled_dot_product_attention.default

    def call(*arguments: Any, **named: Any) -> Any:
        return instead(partial(kernel.decompose, *arguments, **named), *arguments, **named)

    _LIBRARY.impl("scaled_dot_product_attention", call, key)


_LIBRARY: Any = torch.library.Library("aten", "IMPL")


def _call(call: Instead, kernel: Any, below: Any, keys: Any, *arguments: Any, **named: Any) -> Any:
    return call(partial(kernel.redispatch, keys & below, *arguments, **named), *arguments, **named)


def in_backward() -> bool:
    """Return whether this thread runs backward, in which parts of a forward pass may be recomputed."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1
