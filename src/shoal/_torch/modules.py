"""The tables of an nn.Module, which its public methods only read, or read without second names."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizedModule

TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps what it registers."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the direct parameters of `module` by attribute. Changing the dict changes the module.

    The parameters of TorchScript are in C++, and the dict is a copy.
    """
    table: Any = module._parameters
    return table if isinstance(table, dict) else dict(table.items())


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the direct buffers of `module` by attribute. Changing the dict changes the module."""
    return module._buffers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct children, keyed by attribute; a module that has two names occurs twice."""
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


def call_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run when `module` is called, or in its backward; torch has no list."""
    return [hook for kind in _HOOKS for hook in getattr(module, kind).values()]


def has_global_hooks() -> bool:
    """Return whether hooks run when any module is called, or may: public functions only set them."""
    found = getattr(nn.modules.module, "_has_any_global_hook", None)
    return found is None or bool(found())


def copied_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a copy of `module` that has neither hooks nor a compiled call."""
    attributes: dict[str, Any] = {**vars(module), **{kind: OrderedDict() for kind in _HOOKS}}
    attributes.pop("_compiled_call_impl", None)
    return attributes


def set_tables(
    module: nn.Module,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    children: dict[str, Any],
) -> None:
    """Replace the tables of `module`, which it shares with the module that it copies."""
    vars(module).update(_parameters=parameters, _buffers=buffers, _modules=children)


def loads_itself(model: nn.Module) -> bool:
    """Return whether a module that is not torch's has its own code to load its state."""
    kinds = {type(part) for part in model.modules()}
    return any(
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        for kind in kinds
        if not kind.__module__.startswith("torch.")
    )


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


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace all tensors of `module` by the results of `change`, as `module.to` does."""
    module._apply(change)


def move_own_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the direct tensors of `module` by the results of `change`, as `module.to` does.

    `to` also moves the children. nn.Module's method is called, since one that a module has in its place
    need not know of `recurse`.
    """
    nn.Module._apply(module, change, recurse=False)


def call_uncompiled(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Call `module` with its hooks, without the compiled call that `set_compiled_call` has set."""
    return module._call_impl(*arguments, **named)


def module_called_in(frame: FrameType) -> nn.Module | None:
    """Return the module whose call runs in a frame of the stack, or None in other frames."""
    return frame.f_locals["self"] if frame.f_code is nn.Module._call_impl.__code__ else None


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `module(...)` run `call`. The public `module.compile` would compile it once more."""
    module._compiled_call_impl = call


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether `module(...)` runs compiled code, by `module.compile` or `set_compiled_call`."""
    return module._compiled_call_impl is not None


def compiled_module(model: object) -> nn.Module | None:
    """Return the module in a model that torch.compile has wrapped; None for any other object."""
    return model._orig_mod if _is_compiled(model) else None


def bare(model: nn.Module) -> nn.Module:
    """Return the user's module, with the original parameter names, from a compiled model."""
    while (wrapped := compiled_module(model)) is not None:
        model = wrapped
    return model


def compiler_of(model: object) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return torch.compile with the options of `model`, a compiled model; None for other objects."""
    return model.dynamo_ctx if _is_compiled(model) else None


def _is_compiled(model: object) -> TypeGuard[OptimizedModule]:
    # The class has no public name. torch.compile has imported its module.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def order_of_packed(frame: FrameType | None) -> Tensor | None:
    """Return the samples in the order in which `pack_padded_sequence`, a caller of `frame`, packs them.

    None if they are packed in their own order. Of samples of one length, the order is not defined
    otherwise: torch sorts them without a stable sort, and does not pass it on.
    """
    while frame is not None and frame.f_code is not pack_padded_sequence.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("sorted_indices")
