"""The engines of models that a plan divides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from shoal._torch.autograd import saved_result
from shoal.data.batch import Batch, Count
from shoal.data.micro import Micro
from shoal.distributed.world import World
from shoal.strategies.comm_timing import tensors_awaited
from shoal.strategies.compiled import Compiler
from shoal.strategies.contracts import Totals
from shoal.strategies.dtensor import is_divided, whole
from shoal.strategies.local import LocalEngine
from shoal.strategies.mesh_engine import MeshEngine, sum_over, summing_group
from shoal.strategies.task import Task
from shoal.strategies.tensor_parallel.plan_check import prove
from shoal.strategies.tensor_parallel.sharded_modules import divide_alike, division_of
from shoal.telemetry.step_timer import COMMUNICATION
from shoal.util.errors import StepError

VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
"""How the names of autograd's nodes begin that only look at a tensor in another shape."""


class PlannedEngine(MeshEngine, LocalEngine):
    """Proves a plan on the first batch, and takes losses of divided logits by parts.

    torch's `loss_parallel` turns the backward of every log-softmax over divided classes into nothing,
    since that of the negative log-likelihood does both; a loss that uses one in another way would be
    right and its gradients wrong. It is refused.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        self._division = division_of(module)

    def compile(self, how: str) -> None:
        """As in one process, where torch can compile what a plan does."""
        self._check_compiled(how)
        super().compile(how)

    def compile_with(self, compiler: Compiler) -> None:
        """As in one process, where torch can compile what a plan does."""
        self._check_compiled("inductor")
        super().compile_with(compiler)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """As in one process, inside of what takes losses of divided logits; see the contract."""
        if self._division is None or self.call is not self.module:  # compiled code is let alone
            return self._gradients_kept(task, batch, autocast=autocast, scale=scale)
        with tensors_awaited(self.world.timeline):
            return self._gradients_kept(task, batch, autocast=autocast, scale=scale)

    def _gradients_kept(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        division = self._division
        if division is None or not division.logits:
            return super().gradients(task, batch, autocast=autocast, scale=scale)
        with division.logits_kept(), _loss_parallel():
            try:
                return super().gradients(task, batch, autocast=autocast, scale=scale)
            except StepError:
                raise
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if "DTensor" not in str(error) and "loss_parallel" not in str(error):
                    raise
                raise _refused(str(error).partition("\n")[0]) from error

    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Backward of a loss that may be a DTensor; see the contract."""
        if self._division is not None and self._division.logits:
            _check_graph(loss)
            loss = whole(loss)
            count = whole(count) if isinstance(count, Tensor) else count
        super().backward(loss, count, micro, size, scale=scale, last=last)

    def begin(self) -> None:
        """The first time, prove the plan; see the contract."""
        super().begin()
        self._prove()

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """The output; the first time the plan is proved, also where the divided model fails."""
        try:
            output = super().infer(task, micro, seed, autocast=autocast)
        except Exception:
            self._prove()
            raise
        self._prove()
        return output

    def _check_compiled(self, how: str) -> None:
        ways = set() if self._division is None else set(self._division.ways)
        hard = ways if how == "script" else ways & {"sequence", "logits"}
        if hard:
            raise StepError(
                given=f"compile={how!r} with shoal.TensorParallel(plan={{…: {min(hard)!r}}})",
                found="torch can't compile the DTensors that pass between its layers",
                fix="leave compile out, or 'sequence' and 'logits' with compile='inductor'",
            )

    def _prove(self) -> None:
        if self._division is not None:
            prove(self._division, self.module, self.world)


class TensorEngine(PlannedEngine):
    """Sums gradients over the data ranks after the last micro-batch, each with its own peers."""

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world)
        self._summing = summing_group(world)

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply, step, clear; StepError where torch would mix divided and whole parameters."""
        for group in optimizer.param_groups:
            at_once = [name for name in ("fused", "foreach") if group.get(name)]
            if at_once and len(set(map(is_divided, group["params"]))) > 1:
                self.discard()
                raise StepError(
                    given=f"{type(optimizer).__name__}(…, {at_once[0]}=True) with "
                    "shoal.TensorParallel()",
                    found="it updates all parameters at once, and only some of them are divided; they "
                    "were not touched",
                    fix=f"leave {at_once[0]} out, or give it two groups: the layers of the plan, and "
                    "the others",
                )
        super().update(optimizer, factor)

    def _differentiate(self, loss: Tensor, seed: Tensor, *, last: bool) -> None:
        super()._differentiate(loss, seed, last=last)
        if last:
            for parameter in self.parameters:
                divide_alike(parameter)
        if last and self._summing is not None:
            if not self._unused_checked:
                self._check_unused()  # after the sums all have gradients
            with self.world.timeline.within(COMMUNICATION):
                sum_over(self._summing, self.parameters)


@contextmanager
def _loss_parallel() -> Iterator[None]:
    """torch's context, which ends only where no exception passes through it."""
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def _check_graph(loss: Tensor) -> None:
    """Refuse a loss in which a log-softmax of divided logits is more than half a cross-entropy."""
    # Nodes, and whether they are reached through a negative log-likelihood, or a view of its input.
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    visited = set(waiting)
    while waiting:
        node, inside = waiting.pop()
        name = "" if node is None else node.name()
        if name.startswith("LogSoftmax") and is_divided(saved_result(node)) and not inside:
            raise _refused("it takes a log-softmax of them that is not part of a cross-entropy")
        if node is None or "FromTorchTensor" in name:
            continue  # what lies behind the last DTensor is the model
        inside = name.startswith("NllLoss") or (inside and name.startswith(VIEWS))
        for child, _ in node.next_functions:
            if (child, inside) not in visited:
                visited.add((child, inside))
                waiting.append((child, inside))


def _refused(found: str) -> StepError:
    return StepError(
        given='a loss of logits that stay divided, as shoal.TensorParallel(plan={…: "logits"}) leaves '
        "them",
        found=found,
        fix="F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction='sum'), without label "
        'smoothing; or "head" in place of "logits", which gathers them',
    )
