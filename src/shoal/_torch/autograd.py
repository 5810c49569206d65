"""Private names of autograd, of tensors and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.versions import imported, required


def after_backward(callback: Callable[[], object]) -> None:
    """Call `callback` once the backward that runs in this thread has computed everything.

    torch offers hooks on tensors and nodes only; none runs after the last node. DDP's reducer uses the
    same queue, so a callback queued before the reducer's runs before it.
    """
    engine = required(torch.autograd.Variable, "_execution_engine", "DataParallel")
    engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether this thread runs a node of a backward pass, as recomputed forward passes do.

    torch's own checkpointing asks the same way; no public call says it.
    """
    return required(torch._C, "_current_autograd_node", "a recomputed forward pass")() is not None


def last_node_number() -> int:
    """Return the number of the node that autograd made last in this thread.

    An operation that autograd records makes its node ahead of its kernel.
    """
    return int(required(torch.autograd, "_get_sequence_nr", "shoal verify")()) - 1


def running_node_number() -> int | None:
    """Return the number of the node that this thread's backward pass runs, or None outside of one."""
    node = required(torch._C, "_current_autograd_node", "shoal verify")()
    return None if node is None else int(required(node, "_sequence_nr", "shoal verify")())


def saved_tensor_hooks() -> int | None:
    """Return a number of the innermost hooks of saved tensors, as checkpointing sets; 0 without any.

    Public functions only set them. The number may be that of later ones once these are gone. None where
    torch lacks the name.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found = None if top is None else top(False)
    return None if top is None else 0 if found is None else id(found[0])


def version(tensor: Tensor) -> int:
    """Return the number of in-place changes of `tensor`. Raises an error for inference tensors.

    torch documents no public counter.
    """
    return int(required(tensor, "_version", "a step"))


def is_view(tensor: Tensor) -> bool:
    """Return whether `tensor` is a view of another tensor. `Tensor._base` is private as well."""
    return bool(required(tensor, "_is_view", "Pipeline")())


COMPILER_ASKS = ("_has_symbolic_sizes_strides", "_is_view", "_typed_storage")
"""Private functions of tensors that torch.compile calls, and that use no values."""


def storage_key(holder: Tensor | torch.UntypedStorage) -> int:
    """Return a number that tensors share while they share memory; unlike `data_ptr`, meta ones too."""
    storage = holder.untyped_storage() if isinstance(holder, Tensor) else holder
    return int(required(storage, "_cdata", "a deferred model"))


def averages(loss: Tensor) -> bool | None:
    """Return whether the operation that computed `loss` averages its input; None if unknown.

    True for `reduction="mean"` and `Tensor.mean` over several elements, False for `reduction="sum"`.
    Only the node of the graph remembers it.
    """
    node: Any = loss.grad_fn
    if node is not None and node.name().startswith("MeanBackward"):
        return getattr(node, "_saved_self_sym_numel", 0) > 1 or None
    reduction = getattr(node, "_saved_reduction", 0)
    return None if reduction not in (1, 2) else reduction == 1


_RESHAPES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


def leaves_of(losses: Sequence[Tensor], behind: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the leaves of the graph of `losses` that require gradients. Only nodes have them.

    Those that are reached only through the tensors `behind` are left out.
    """
    nodes = _nodes(losses, {each.grad_fn for each in behind})
    return [node.variable for node in nodes if hasattr(node, "variable")]


def reshapes_of(loss: Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the shapes before and after each `view` and `reshape` in the graph of a loss.

    Only nodes have them. Compiled and recomputed code has no nodes of its own.
    """
    for node in _nodes([loss], set()):
        if node.name() in _RESHAPES:
            [after, *_] = node._input_metadata
            yield tuple(node._saved_self_sym_sizes), tuple(after.shape)


def _nodes(tensors: Sequence[Tensor], seen: set[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph of `tensors`, without those that only `seen` ones lead to."""
    waiting: list[Any] = [each.grad_fn for each in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(before for before, _ in node.next_functions)


def saved_result(node: Any) -> Tensor:
    """Return the output that a node such as LogSoftmaxBackward saved for its backward.

    Only the node still holds it; the operation has returned a part of it.
    """
    result: Tensor = required(node, "_saved_result", "TensorParallel")
    return result


_APPLY = vars(torch.autograd.Function)["apply"]


def _framed_apply(cls: type[torch.autograd.Function], *arguments: Any, **named: Any) -> Any:
    return _APPLY.__get__(None, cls)(*arguments, **named)


APPLY_CODES = {
    _framed_apply.__code__,
    getattr(getattr(_APPLY, "__func__", None), "__code__", None),
}
"""The code of `autograd.Function.apply` inside `framed_apply`, and of torch's own if it is Python."""


@contextmanager
def framed_apply() -> Iterator[None]:
    """Give `autograd.Function.apply` a Python frame inside the block.

    `torch.fx` records the operations of a Function and loses its backward, so a trace looks for this
    frame among its callers. `apply` is a Python function until torch 2.13 and a C function in 2.15.
    """
    torch.autograd.Function.apply = classmethod(_framed_apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]


def made_by(node: Any, function: type[torch.autograd.Function]) -> bool:
    """Return whether `node` is the backward node of `function`; torch makes the class of a node."""
    return getattr(node, "_forward_cls", None) is function


def checkpoint(module: nn.Module, **options: Any) -> None:
    """Recompute the forward of `module` in backward.

    The public `checkpoint_wrapper` changes parameter names; this composable one hooks the module.
    """
    place = "torch.distributed._composable.checkpoint_activation"
    imported(place, "checkpoint", "ActivationCheckpointing")(module, **options)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint` was applied to `module` itself."""
    place = "torch.distributed._composable.contract"
    registry = imported(place, "_get_registry", "ActivationCheckpointing")(module)
    return "checkpoint" in (registry or {})
