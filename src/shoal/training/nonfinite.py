"""The module in which a step first has a value that is not finite: the step runs again with hooks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.dispatch import tree_flatten
from shoal.data.batch import Batch
from shoal.strategies.contracts import Engine
from shoal.strategies.task import Task

FORWARD, BACKWARD = "forward", "backward"


def find_nonfinite(
    engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
) -> str:
    """Compute the gradients of a batch again; return where a value is not finite first. Collective.

    The caller discards the gradients. Returns an empty string if no module has such a value.
    """
    search = _Search()
    with ExitStack() as stack:
        search.observe(engine.module, stack)
        engine.gradients(task, batch, autocast=autocast, scale=scale)
    ranks = list(enumerate(engine.world.gather(search.found)))
    # The last stage of a pipeline is the first in the backward pass.
    for phase, order in ((FORWARD, ranks), (BACKWARD, ranks[::-1])):
        for rank, found in order:
            if found is not None and found[0] == phase:
                return f"{found[1]}, in the {phase} pass on rank {rank}"
    return ""


class _Search:
    """Hooks of modules and tensors; `found` are the pass and the place of the first value."""

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None

    def observe(self, model: nn.Module, stack: ExitStack) -> None:
        """Register hooks on all modules until the stack closes."""
        for name, module in model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            before = partial(self._before, label, stack)
            after = partial(self._after, label, stack, root=module is model)
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ):
                stack.callback(handle.remove)

    def _before(self, label: str, stack: ExitStack, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _floats((args, kwargs)):
            self._look(FORWARD, f"the input of {label}", tensor)
            self._follow(tensor, f"the gradient that {label} passes on", stack)
        for name, parameter in module.named_parameters(recurse=False):
            self._look(FORWARD, f"{name} of {label}", parameter)
            self._follow(parameter, f"the gradient of {name} of {label}", stack)

    def _after(
        self, label: str, stack: ExitStack, module: nn.Module, args: Any, output: Any, *, root: bool
    ) -> None:
        for tensor in _floats(output):
            self._look(FORWARD, f"the output of {label}", tensor)
            if root:
                self._follow(tensor, "the gradient that the loss function passes on", stack)

    def _look(self, phase: str, place: str, tensor: Tensor) -> None:
        if self.found is None and not bool(torch.isfinite(tensor.detach()).all()):
            self.found = phase, place

    def _follow(self, tensor: Tensor, place: str, stack: ExitStack) -> None:
        """Look at the gradient of a tensor, once the backward pass has computed it."""
        if tensor.requires_grad and torch.is_grad_enabled():
            handle = tensor.register_hook(partial(self._look, BACKWARD, place))
            stack.callback(handle.remove)


def _floats(value: Any) -> list[Tensor]:
    leaves = tree_flatten(value)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
