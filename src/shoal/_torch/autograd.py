"""Private names of autograd and of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def after_backward(callback: Callable[[], object]) -> None:
    """Call `callback` once the backward that runs in this thread has computed everything.

    torch offers hooks on tensors and nodes only; none runs after the last node. DDP's reducer uses the
    same queue, so a callback queued before the reducer's runs before it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[arg-type]


def in_backward() -> bool:
    """Return whether this thread runs a node of a backward, as recomputed forwards do."""
    return torch._C._current_autograd_node() is not None


def version(tensor: Tensor) -> int:
    """Return how often `tensor` was changed in place. Inference tensors have none and raise."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether `tensor` is a view of another tensor."""
    return tensor._is_view()


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share while they share memory; unlike `data_ptr`, meta ones too."""
    return int(tensor.untyped_storage()._cdata)


def averages(loss: Tensor) -> bool | None:
    """Return whether the operation that computed `loss` averages its input; None if it can't be known.

    True for `reduction="mean"` and `Tensor.mean` over several elements, False for `reduction="sum"`.
    """
    node: Any = loss.grad_fn
    if node is not None and node.name().startswith("MeanBackward"):
        return bool(node._saved_self_sym_numel > 1) or None
    reduction = getattr(node, "_saved_reduction", 0)
    return None if reduction not in (1, 2) else reduction == 1


def saved_result(node: Any) -> Tensor:
    """Return the output that a node such as LogSoftmaxBackward saved for its backward."""
    result: Tensor = node._saved_result
    return result
