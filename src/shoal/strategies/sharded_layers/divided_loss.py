"""Losses of logits that stay sharded over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal._torch.autograd import saved_result
from shoal.data.batch import Count
from shoal.strategies.dtensor import is_divided, whole
from shoal.strategies.sharded_layers.sharded_modules import division_of
from shoal.util.errors import StepError

VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
"""Prefixes of the names of autograd nodes that only change the shape of a tensor."""


def whole_loss(model: nn.Module, loss: Tensor, count: Count) -> tuple[Tensor, Count]:
    """Return loss and count as plain tensors if a plan leaves the logits of `model` sharded.

    Raises StepError for a loss whose gradients would be wrong.
    """
    division = division_of(model)
    if division is None or not division.logits:
        return loss, count
    _check_graph(loss)
    return whole(loss), whole(count) if isinstance(count, Tensor) else count


def _check_graph(loss: Tensor) -> None:
    """Raise StepError if a log-softmax of sharded logits is not part of a cross-entropy."""
    # Nodes, and whether they are reached through a negative log-likelihood, or a view of its input.
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    visited = set(waiting)
    while waiting:
        node, inside = waiting.pop()
        name = "" if node is None else node.name()
        if name.startswith("LogSoftmax") and is_divided(saved_result(node)) and not inside:
            raise logits_refused("it takes a log-softmax of them that is not part of a cross-entropy")
        if node is None or "FromTorchTensor" in name:
            continue  # the nodes before the first DTensor belong to the model
        inside = name.startswith("NllLoss") or (inside and name.startswith(VIEWS))
        for child, _ in node.next_functions:
            if (child, inside) not in visited:
                visited.add((child, inside))
                waiting.append((child, inside))


def logits_refused(found: str) -> StepError:
    """Return the error of a loss that does not support sharded logits."""
    return StepError(
        given='a loss of logits that stay sharded, as with shoal.TensorParallel(plan={…: "logits"})',
        found=found,
        fix="call F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction='sum') without "
        'label smoothing; or use "head", which gathers the logits, instead of "logits"',
    )
