"""The gradients of a custom training loop, and checks that the loop uses them in the right order."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal._torch.autograd import version
from shoal.data.batch import Count
from shoal.data.micro import MicroBatch
from shoal.strategies.contracts import LoopGradients
from shoal.strategies.correction import Totals
from shoal.strategies.dtensor import share
from shoal.strategies.held_parameters import dense_gradient, first
from shoal.strategies.optimizer_check import has_parts, prepare_optimizers
from shoal.strategies.reducer import Reducer
from shoal.util.errors import StepError


class CheckedGradients(LoopGradients):
    """Gradients that a reducer computes, with checks of the order of the loop's calls."""

    def __init__(self, reducer: Reducer) -> None:
        super().__init__()
        self._reducer = reducer
        self._held = reducer.held
        self._computed: dict[int, tuple[int, int]] = {}
        """The states of the gradients after the last backward of the batch."""
        self._finished: dict[int, tuple[int, int]] = {}
        """The states of the gradients of the last finished batch, after `batch.finish` or the step."""
        self._awaited = False
        """Whether the optimizer has yet to step on them."""
        self._emptied = False
        """Whether the optimizer stepped after they had been cleared."""
        self._warned = False
        self._divided = has_parts(self._held.world)
        self._own = frozenset(map(id, self._held.parameters))
        for register, method in (
            (register_optimizer_step_pre_hook, CheckedGradients.prepare_step),
            (register_optimizer_step_post_hook, CheckedGradients.note_step),
        ):
            handle = register(_calling(method, weakref.ref(self)))
            weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """Forget the sums of a batch that was skipped; see the contract."""
        self._check_cleared()
        self._forget_skipped()

    def backward(self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, last: bool) -> None:
        """Run backward for one micro-batch; see the contract."""
        self._reducer.backward(loss, count, micro, size, scale=1.0, last=last)
        if last:
            self._computed = self._states()

    def check(self) -> None:
        """Compare the gradients with those that the last backward left; see the contract."""
        if self._computed != self._states():
            raise StepError(
                given="batch.finish(model)",
                found="the gradients were changed between the last batch.backward and batch.finish, "
                "before they were averaged",
                fix="use batch.finish(model, clip=1.0) to clip them; make other changes after it",
            )

    def totals(self) -> Totals:
        """Return the sums of the batch and the norm of its gradients; see the contract."""
        return self._reducer.totals().read()

    def finish(self, factor: float) -> None:
        """Multiply the gradients, and await the optimizer step; see the contract."""
        self._reducer.multiply(factor)
        self._held.say_draws()
        self._finished = self._states()
        self._awaited = bool(self._finished)
        self._emptied = False

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StepError for a step before `batch.finish`, or for an optimizer that ranks can't use.

        A loop may have passed its optimizer to no Run. Collective at the optimizer's first step.
        """
        if not self._steps_on_own(optimizer):
            return
        if self._reducer.pending:
            raise StepError(
                given="optimizer.step()",
                found="batch.finish was not called before it: the gradients are not yet those of the "
                "mean over the global batch",
                fix="call batch.finish(model) after the loop over the batch, then optimizer.step()",
            )
        if self._divided:
            prepare_optimizers([optimizer], self._held.world)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped, and whether on gradients that were cleared."""
        if (
            not self._held.unused_checked
            and self._held.world.size > 1
            and self._steps_on_own(optimizer)
        ):
            self._warn_unreduced()
        if self._awaited and self._steps_on_own(optimizer):
            self._awaited = False
            given = (p.grad for group in optimizer.param_groups for p in group["params"])
            self._emptied = all(gradient is None for gradient in given)
            # The loop may have clipped them since, and may never clear those of other parameters.
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._finished = {k: v for k, v in self._states().items() if k in own}

    def _check_cleared(self) -> None:
        """Raise StepError if the gradients of a finished batch were cleared too early or never."""
        finished, self._finished = self._finished, {}
        emptied, self._emptied = self._emptied, False
        self._awaited = False
        kept = [p for p in self._held.parameters if p.requires_grad and _unchanged(p, finished)]
        fix = "call batch.finish(model), optimizer.step(), optimizer.zero_grad(), in this order; to "
        fix += "accumulate gradients, use shoal.Loader(…, micro_batches=4)"
        if kept:
            ids = set(map(id, kept))
            names = first([name for name, p in self._held.module.named_parameters() if id(p) in ids])
            self._reducer.discard()
            found = f"the gradients of the previous batch would be added to those of this one: {names}"
        elif emptied:
            found = "the gradients of the previous batch were cleared between batch.finish and "
            found += "optimizer.step(), so the step changed nothing"
        else:
            return
        raise StepError(given="batch.backward on a new batch", found=found, fix=fix)

    def _forget_skipped(self) -> None:
        """Drop the sums of a skipped batch. Raise StepError if its gradients still exist."""
        if not self._reducer.pending:
            return
        if any(p.grad is not None for p in self._held.parameters):
            raise StepError(
                given="batch.backward on a new batch",
                found="batch.finish was not called for the previous batch, whose gradients still exist",
                fix="call batch.finish(model) after each batch, or optimizer.zero_grad() to skip one; "
                "to accumulate gradients, use shoal.Loader(…, micro_batches=4)",
            )
        self._reducer.discard()

    def _warn_unreduced(self) -> None:
        """Print once that an optimizer has stepped on gradients that were not summed over ranks."""
        if not self._warned and any(p.grad is not None for p in self._held.parameters):
            self._warned = True
            self._held.world.print(
                f"shoal: an optimizer stepped on a {type(self._held.module).__name__} before any "
                "batch.backward or step(batch): each rank trains on its own gradients. Iterate over a "
                "shoal.Loader, and call batch.backward and batch.finish in place of loss.backward"
            )

    def _states(self) -> dict[int, tuple[int, int]]:
        """Return the address and version of each gradient, by parameter."""
        return {id(p): _state(p, p.grad) for p in self._held.parameters if p.grad is not None}

    def _steps_on_own(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])


def _state(parameter: nn.Parameter, gradient: Tensor) -> tuple[int, int]:
    """Return the address of a gradient and the number of its changes."""
    own = share(dense_gradient(parameter, gradient))
    return own.data_ptr(), version(own)


def _unchanged(parameter: nn.Parameter, before: dict[int, tuple[int, int]]) -> bool:
    gradient = parameter.grad
    return gradient is not None and before.get(id(parameter)) == _state(parameter, gradient)


def _calling(
    method: Callable[[CheckedGradients, torch.optim.Optimizer], None],
    gradients: weakref.ref[CheckedGradients],
) -> Callable[..., None]:
    def call(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = gradients()
        if found is not None:
            method(found, optimizer)

    return call
