"""Private names of torch's dispatcher and of nested containers.

torch 2.11 and 2.13 have no `torch.utils.pytree`: the functions on trees are in a private module only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from shoal._torch.versions import required

__all__ = [
    "RealIntegers",
    "TorchDispatchMode",
    "TreeSpec",
    "UncompiledMode",
    "has_values",
    "intercept",
    "is_wrapper",
    "overloads_of",
    "schema_of",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_modes",
    "without_overrides",
]


class UncompiledMode(TorchDispatchMode):
    """Dispatch mode in which no compiled code runs.

    torch then does not import its compiler, which takes a second. A torch without the method imports
    it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RealIntegers(UncompiledMode):
    """Dispatch mode in which new tensors of integers are not fake, but have values."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation without other modes if all of its tensors have values."""
        named = named or {}
        with without_modes() if has_values(function, arguments, named) else nullcontext():
            return function(*arguments, **named)


def has_values(function: Any, arguments: Any, named: Any) -> bool:
    """Return whether all tensors of an operation have values, or, without any, it makes integers."""
    tensors = [each for each in tree_iter((arguments, named)) if isinstance(each, Tensor)]
    if tensors:
        return all(type(each) is Tensor for each in tensors)
    dtype = named.get("dtype")
    if dtype is None:
        arange = schema_of(function).name == "aten::arange"
        return arange and all(type(each) is int for each in arguments)
    return not dtype.is_floating_point and not dtype.is_complex


def overloads_of(operation: Any) -> Any:
    """Return the operation of which `operation` is an overload, the key of torch's flop formulas.

    Return None if torch lacks the name, so that no formula is found.
    """
    return getattr(operation, "_overloadpacket", None)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation, which marks the arguments that it changes."""
    return required(operation, "_schema", "a deferred model")


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class hold other tensors and have no memory, as DTensor."""
    return hasattr(kind, "__tensor_flatten__")


def without_modes() -> AbstractContextManager[Any]:
    """Hide the operations inside from dispatch modes, unless this torch lacks the name."""
    disable: Callable[[], AbstractContextManager[Any]] = getattr(
        _python_dispatch, "_disable_current_modes", nullcontext
    )
    return disable()


def without_overrides() -> AbstractContextManager[Any]:
    """Call functions on tensors of a subclass without its `__torch_function__`."""
    disable: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
    return disable()


def intercept(
    namespace: str, before: Mapping[str, Callable[..., None]], key: str
) -> Callable[[], None] | None:
    """Call `before[name]` with the arguments of each call of an operator, ahead of its kernel.

    The calls are intercepted at the dispatch key `key` and continue below it. Return the function that
    ends the interception, or None if this torch lacks a name for it and nothing is intercepted.
    """
    keyset = getattr(torch._C, "_dispatch_keyset_full_after", None)
    library: Any = torch.library.Library(namespace, "IMPL")
    end: Callable[[], None] | None = getattr(library, "_destroy", None)
    if keyset is None or end is None:
        return None
    below = keyset(getattr(torch._C.DispatchKey, key))
    for name, call in before.items():
        kernel = getattr(getattr(torch.ops, namespace), name).default
        library.impl(name, partial(_call_first, call, kernel, below), key, with_keyset=True)
    return end


def _call_first(call: Callable[..., None], kernel: Any, below: Any, keys: Any, *arguments: Any) -> Any:
    call(*arguments)
    return kernel.redispatch(keys & below, *arguments)
