"""The tables of an nn.Module, which its public methods only read, or read without second names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that `module` itself holds by attribute; changing it changes the module."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that `module` itself holds by attribute; changing it changes the module."""
    return module._buffers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct children by attribute; a module that has two names occurs twice."""
    return module._modules


def remove_forward_hooks(module: nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks of `module` for which `unwanted` returns True.

    torch removes hooks by the handle that registering returned, which a copied module does not have.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if unwanted(hook):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def copy_with_children(
    module: nn.Module, child: Callable[[nn.Module], nn.Module], **attributes: Any
) -> nn.Module:
    """Return a shallow copy of `module` that shares its tensors and has `child` of each child.

    `attributes` are set on the copy. A compiled call is left out: it would call the original.
    """
    twin = nn.Module.__new__(type(module))
    vars(twin).update(vars(module), **attributes)
    vars(twin).pop("_compiled_call_impl", None)
    twin._modules = {
        name: None if part is None else child(part) for name, part in module._modules.items()
    }
    return twin
