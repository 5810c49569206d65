"""The contracts of Strategy and Engine.

All other packages use strategies through these few types. A strategy is frozen options with a method
`apply`, which returns an engine, usually one with a gradient reducer (see `engine.py`).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.data.batch import Batch, Count
from shoal.data.micro import MicroBatch
from shoal.data.step_result import StepResult
from shoal.distributed.world import World
from shoal.strategies.compiled import Compiler
from shoal.strategies.correction import AnyTotals, Factor, Totals
from shoal.strategies.task import Task
from shoal.util.errors import StepError


class Strategy(Protocol):
    """Frozen options of one parallelism strategy. `apply` creates its engine."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the layout that it uses, or rejects with an error of its own."""
        ...

    @property
    def defers(self) -> bool:
        """Whether it accepts a model on the meta device and allocates it, to be filled afterwards."""
        ...

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Parallelize `model` over `world` in place, with the same names, and return its engine.

        Moves the modules that this rank keeps, all or some, to `world.device`.
        """
        ...


@runtime_checkable
class ModelTransform(Protocol):
    """Strategy that changes a model and leaves gradients and engine to the strategy after it."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the layout that it uses, if any."""
        ...

    def spread(self, model: nn.Module, world: World) -> None:
        """Change `model` in place, with the same names."""
        ...


PartialSums: TypeAlias = Sequence[Sequence[Tensor]]
"""The gradients of the subtrees that one rank has added up, in the order of the parameters."""


@runtime_checkable
class RepeatableGradients(Protocol):
    """Engine whose gradients on a rank another rank can recompute, with the same bits."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the parameters, in the order of the partial sums."""
        ...

    def observed(self, observer: Callable[[PartialSums], None]) -> AbstractContextManager[None]:
        """Call `observer` with the partial sums of this rank in the batch inside the block."""
        ...

    def compute(
        self, rank: int, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> PartialSums:
        """Return the partial sums that `rank` computes in the batch, and change nothing else."""
        ...


class Engine(ABC):
    """The live counterpart of a Strategy: computes gradients and updates parameters for Step.

    After each `gradients`, even a failed one, exactly one of `update` and `discard` follows on every
    rank, so that both may be collective and may count. State depends on the rank only in the part of
    the model that it holds. `synchronize` makes everything else the same.
    """

    module: nn.Module
    """The user's module."""
    world: World
    strategy: str = ""
    """The strategy that created it, as text."""
    loop: LoopGradients | None = None
    """The gradients of a custom training loop; None if such a loop cannot use the engine."""
    reports_loss: bool = True
    """Whether the output and loss of this rank count. Of the ranks with the same samples exactly one
    reports, or each reports a slice of them. On other ranks, `infer` may return None."""
    independent_steps: bool = False
    """Whether each rank steps separately, so that one may fail after the others have stepped."""
    whole_batches: bool = False
    """Whether layers in training take statistics over the whole batch, so that it has to be one
    micro-batch."""
    waits_because: str = "its engine updates the parameters in a way of its own"
    """Why the totals of a step must be known on the host before its update; empty if they need not be.
    """
    unsettled: Callable[[], None] | None = None
    """Looks at the result of the last step of a Step, if no one has done so; see `settle`."""
    gathered_dtype: torch.dtype | None = None
    """The dtype in which sharded parameters are gathered, if that is not their own."""
    statistics: int | str = "batch"
    """The samples over which layers take statistics; see `parallelize`."""
    division_reported: bool = False
    """Whether the layers whose results depend on the split of the batch have been reported."""
    noise_stream: str = "noise"
    """The stream of random numbers that this rank's forward draws from; see `World.reseed`."""

    @abstractmethod
    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the forward and backward passes for the complete batch.

        Afterwards the gradients of the parameters that this rank holds are those of
        `scale * loss_sum / batch.size` summed over the world, and no other module's have changed.
        `autocast` is the dtype of mixed precision, or None. The caller has entered FORWARD on the
        `world.timeline`; this method enters BACKWARD and, before the sums, UPDATE. Collective.
        """

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Multiply the gradients by `factor`, take one optimizer step, and clear the gradients.

        With a factor of 0 (see `correct`), parameters and optimizer state do not change. The factor is
        a tensor on the device only if `waits_because` is empty.
        """

    def settle(self) -> None:
        """Look at the result of the last step, if no one has done so. Collective.

        Raises StepError if it was not finite.
        """
        look, self.unsettled = self.unsettled, None
        if look is not None:
            look()

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients without a step."""

    @abstractmethod
    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the model's output on one micro-batch, without gradients. Collective.

        It may be None on a rank that does not report the loss.
        """

    def move_targets(self, output: Any, micro: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device of the output, where the loss needs it."""
        return micro

    @abstractmethod
    def compile(self, how: str) -> None:
        """Run the forward pass compiled: "inductor", "blocks" or "script"."""

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward pass compiled by `compiler` in every call of the module.

        For a model that is passed as `torch.compile(model)`, with the backend and options of that call.
        """
        raise StepError(
            given=f"torch.compile({type(self.module).__name__}) and {self.world.layout}",
            found="its strategy can only compile the parts of a model separately",
            fix="call shoal.parallelize(model, world) with the uncompiled model; then use "
            "shoal.Step(model, …, compile='inductor'), or torch.compile(model) in a custom training "
            "loop",
        )

    def check_model(self) -> None:  # noqa: B027 - most run the model as it is
        """Check once that a model whose forward was changed gives the same results. Collective.

        Called before the first batch that a custom training loop begins, and maybe before later ones.
        """

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:  # noqa: B027
        """Make buffers, parameters and optimizer state that differ between ranks the same.

        Called before evaluating, when the optimizer may be unknown, and before state is saved.
        Collective.
        """

    def state(self) -> dict[str, Any]:
        """Return state in addition to the module's and the optimizer's; usually there is none.

        It is the same on all ranks, so that any number of ranks can load it.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - keeping nothing is normal
        """Restore the value that `state` returned."""


class StepCounter(Protocol):
    """Counter of the optimizer steps of a loop that calls `batch.backward`."""

    def check_loop(self) -> None:
        """Raise StepError for options that such a loop ignores."""

    def try_loss(self, batch: Batch) -> None:
        """Check on the first batch that the loss adds up, if it has a loss function. Collective."""

    def count(self, result: StepResult) -> StepResult:
        """Count an optimizer step with this `result`, and return it."""
        ...


class LoopGradients(ABC):
    """The gradients of a model that a custom training loop trains, one micro-batch at a time.

    The loop does not report its optimizer steps. Steps and cleared gradients at the wrong time raise
    StepError. An engine that must know of each step does not have this object.
    """

    def __init__(self) -> None:
        self._counters: list[weakref.ref[StepCounter]] = []

    def count_in(self, counter: StepCounter) -> None:
        """Let `counter` count the batches for which a loop calls `batch.finish` from now on."""
        self._counters = [reference for reference in self._counters if reference() is not None]
        self._counters.append(weakref.ref(counter))

    @property
    def counters(self) -> list[StepCounter]:
        """The counters of the batches that are finished on this model, oldest first."""
        return [counter for reference in self._counters if (counter := reference()) is not None]

    @abstractmethod
    def begin(self) -> None:
        """Prepare for the first `batch.backward` of a batch.

        Forgets a batch that the loop skipped: one whose gradients were cleared. Raises StepError if a
        batch was neither skipped nor finished, if its gradients were not cleared after `batch.finish`,
        or if they were cleared before the optimizer stepped.
        """

    @abstractmethod
    def backward(self, loss: Tensor, count: Count, micro: MicroBatch, size: int, *, last: bool) -> None:
        """Run backward for one micro-batch of a global batch of `size`; reduce over ranks if `last`.

        Adds to the gradients of this engine's module and of no other, though the loss may have run
        through others (a GAN's). After the last one only `batch.finish` may change the gradients.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise StepError if the loop has changed the gradients before `batch.finish`."""

    @abstractmethod
    def totals(self) -> Totals:
        """Return the sums of the batch whose last backward has run, and the norm of its gradients."""

    @abstractmethod
    def finish(self, factor: float) -> None:
        """Multiply the gradients by `factor`, which turns them into the gradients of the mean.

        The optimizer step comes next.
        """


def no_gradient() -> StepError:
    """Return the error of a loss that has no gradient."""
    return StepError(
        given="the loss of a micro-batch",
        found="it does not depend on any trainable parameter",
        fix="compute it from the model's output, without .detach(), .item() or no_grad()",
    )
