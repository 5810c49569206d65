"""Observation of the loss of each optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal.data.batch import Batch
from shoal.data.step_result import StepResult
from shoal.tools.verify.hooks import Observer
from shoal.tools.verify.observed_calls import call_before
from shoal.training.step import Step


class LossObserver:
    """The losses of this process: those of StepResults, and those of backward passes before a step."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._recorded = {True: 0, False: 0}
        self._sum = 0.0
        self._passes = 0

    def backward_begins(self, tensors: Any, grad_tensors: Any = None, *_: Any, **named: Any) -> None:
        """Add a scalar whose backward pass begins. Shoal's own passes have `grad_tensors`."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None and all(isinstance(root, Tensor) for root in roots):
            self._sum += sum(float(root.detach()) for root in roots if root.numel() == 1)
            self._passes += 1

    def stepped(self, *_: Any) -> None:
        """Record the loss of the backward passes since the last step; another optimizer has none."""
        if self._passes:
            self._record(self._sum, self._passes, shoal=False)
        self._sum, self._passes = 0.0, 0

    def returned(self, result: StepResult) -> None:
        """Record the loss of a StepResult."""
        self._record(result.loss, result.counted, shoal=True)

    def _record(self, loss: float, count: float, *, shoal: bool) -> None:
        self._recorded[shoal] += 1
        self._observer.write_event("loss", loss=loss, count=count, shoal=shoal)

    def step_begins(self, *_: Any) -> None:
        """End the process after the last step to observe, when its StepResult is known."""
        recorded = self._recorded[True] or self._recorded[False]
        if min(recorded, self._observer.step) >= self._observer.options.stop_after:
            self._observer.end_process()


def observe_losses(observer: Observer) -> None:
    """Observe the losses of this process until it ends."""
    losses = LossObserver(observer)
    call_before(torch.autograd, "backward", losses.backward_begins)
    register_optimizer_step_pre_hook(losses.step_begins)
    register_optimizer_step_post_hook(losses.stepped)
    for kind, name in ((Step, "__call__"), (Batch, "finish")):
        setattr(kind, name, _returning(getattr(kind, name), losses.returned))


def _returning(original: Any, returned: Callable[[StepResult], None]) -> Any:
    @wraps(original)
    def function(*arguments: Any, **named: Any) -> StepResult:
        result: StepResult = original(*arguments, **named)
        returned(result)
        return result

    return function
