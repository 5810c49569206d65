"""The engine of a model whose layers are sharded by a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.distributed.world import World
from shoal.strategies.comm_timing import tensors_awaited
from shoal.strategies.compiled import Compiler
from shoal.strategies.correction import AnyTotals
from shoal.strategies.coupling.notice import say_draws
from shoal.strategies.eval_mode import untouched
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import LocalEngine
from shoal.strategies.mesh_reducer import (
    MeshReducer,
    data_group,
    first_along,
    norm_of_parts,
    summing_group,
)
from shoal.strategies.random_draws.draws import slices_of
from shoal.strategies.random_draws.slices import DTensorDraws
from shoal.strategies.reducer import Reducer
from shoal.strategies.sharded_layers.divided_loss import logits_refused
from shoal.strategies.sharded_layers.sharded_modules import ShardedLayers, division_of
from shoal.strategies.task import Task
from shoal.util.errors import ShoalError, StepError

Exact: TypeAlias = Callable[[], AbstractContextManager[None]]


def tensor_parallel_engine(module: nn.Module, world: World) -> PlannedEngine:
    """Return the engine of a model with sharded layers, which sums gradients over replicas."""
    return PlannedEngine(
        MeshReducer(
            HeldParameters(module, world),
            reports_loss=first_along(world),
            gradient_group=summing_group(world),
            buffer_group=data_group(world),
            norm=norm_of_parts,
        )
    )


class PlannedEngine(LocalEngine):
    """Engine that checks a plan on the first batch, and computes losses of sharded logits in parts.

    In the context `exact` the module computes with parameters in their own dtype.

    torch's `loss_parallel` skips the backward of every log-softmax over sharded classes, because the
    backward of the negative log-likelihood does both. A loss that uses a log-softmax in another way
    would be right, with wrong gradients. It raises StepError.
    """

    def __init__(self, reducer: Reducer, exact: Exact = nullcontext) -> None:
        super().__init__(reducer)
        self.division = division_of(self.module)
        """The layers of the plan; None if there is no plan, as with FSDP alone."""
        self._exact = exact

    def compile(self, how: str) -> None:
        """Compile as in one process, if torch can compile the layers of the plan."""
        check_compilable(self.division, how)
        super().compile(how)

    def compile_with(self, compiler: Compiler) -> None:
        """Compile as in one process, if torch can compile the layers of the plan."""
        check_compilable(self.division, "inductor")
        super().compile_with(compiler)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run as on one process, with sharded logits if the plan has them; see the contract."""
        division = self.division
        if division is None:
            return super().gradients(task, batch, autocast=autocast, scale=scale)
        self._find_slices(task, batch.micros[0], batch.seed)
        with ExitStack() as stack:
            if not self.compiled:  # compiled code cannot be marked
                stack.enter_context(tensors_awaited(self.world.timeline))
                stack.enter_context(self._draws_of_slices(division))
            if division.logits:
                stack.enter_context(division.logits_kept())
                stack.enter_context(_divided_losses())
            totals = super().gradients(task, batch, autocast=autocast, scale=scale)
        say_draws(self.module, self.world)
        return totals

    def _draws_of_slices(self, division: ShardedLayers) -> AbstractContextManager[object]:
        slices = slices_of(self.module)
        known = slices is not None and slices.known and division.sequence
        return DTensorDraws() if known else nullcontext()

    def _find_slices(self, task: Task, micro: MicroBatch, seed: int) -> None:
        slices = slices_of(self.module)
        if slices is None or self.compiled or not self.module.training:
            return
        call = partial(super().infer, task, micro, seed, autocast=None)
        with self._exact():
            slices.find(self.module, self.world, call, micro.value)

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output; the first time, check the plan before."""
        if self.division is None:
            return super().infer(task, micro, seed, autocast=autocast)
        with self._exact():
            call = partial(super().infer, task, micro, seed, autocast=None)
            if self.world.layout.degree("context") > 1 and not self.division.proved:
                self._compare_slices(call, micro.value)
            self.division.prove(self.module, self.world, call, micro.value)
        self._find_slices(task, micro, seed)
        with self._draws_of_slices(self.division):
            output = super().infer(task, micro, seed, autocast=autocast)
        say_draws(self.module, self.world)
        return output

    def _compare_slices(self, call: Callable[[], Any], values: Any) -> None:
        """Let ContextParallel compare its slices first, as it does in its first forward pass.

        The comparison of the plan explains an error of torch.
        """
        try:
            with torch.no_grad(), untouched(self.module, values):
                call()
        except ShoalError:
            raise
        except Exception:
            return

    def check_model(self) -> None:
        """Check the plan once, if there is one; see the contract."""
        if self.division is not None:
            with self._exact():
                self.division.prove(self.module, self.world)


def check_compilable(division: ShardedLayers | None, how: str) -> None:
    """Raise StepError if torch cannot compile the layers of a plan."""
    hard = set() if division is None else set(division.ways)
    if how != "script":
        hard &= {"sequence"} if how == "blocks" else {"sequence", "logits"}  # logits are not in blocks
    if hard:
        raise StepError(
            given=f"compile={how!r} with shoal.TensorParallel(plan={{…: {min(hard)!r}}})",
            found="torch cannot compile the DTensors between the layers of the plan",
            fix="leave compile out, or use compile='blocks' and a plan without 'sequence'",
        )


@contextmanager
def _divided_losses() -> Iterator[None]:
    """Compute losses of sharded logits in parts. Raise StepError for losses without support."""
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    except StepError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "DTensor" not in str(error) and "loss_parallel" not in str(error):
            raise
        raise logits_refused(str(error).partition("\n")[0]) from error
    finally:
        context.__exit__(None, None, None)  # torch's context does not end after an exception
