"""The contracts of Strategy and Engine, and what a step decides from the sums of a batch.

Everything above this file talks through these few types. A strategy is frozen options with `apply`,
which returns an engine: one of a runner and a gradient reducer (see `engine.py`), or its own.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.data.batch import Batch, Count, StepResult
from shoal.data.micro import Micro
from shoal.distributed.world import World
from shoal.strategies.compiled import Compiler
from shoal.strategies.task import Task
from shoal.util.arguments import is_number
from shoal.util.errors import StepError


class Totals(NamedTuple):
    """What one global batch came to, as plain numbers, the same on all ranks unless `local`.

    `loss_sum` and `counted` are sums over the global batch. `norm` is the L2 norm of the gradients as
    they stand: of `scale * loss_sum / batch.size`, before the correction by the true count.
    With `local`, sums and norm are of this rank's share: asynchronous strategies
    exist to avoid the collective, and their ranks decide for themselves.
    """

    loss_sum: float
    counted: float
    norm: float
    local: bool = False


class Correction(NamedTuple):
    """What to do with the gradients of a step: multiply them by `factor`, or skip if not `finite`.

    `loss` is the mean over the global batch, `norm` that of its gradients before clipping.
    """

    loss: float
    norm: float
    counted: float
    factor: float
    finite: bool


def correct(totals: Totals, *, size: int, scale: float, clip: float | None) -> Correction:
    """Decide on one factor that corrects, unscales and clips the gradients of a step.

    Backward ran on `scale * loss_sum / size` with `size` known beforehand; the step minimises
    `loss_sum / count`. So the true gradients are `size / (count * scale)` times those that stand, and
    so is their norm; clipping multiplies by `min(1, clip / norm)` (Pascanu et al. 2013, with torch's
    1e-6 in the denominator). A rank that stands for itself and had no sample changes nothing: 0.
    """
    if totals.local and totals.counted == totals.loss_sum == 0:
        return Correction(math.nan, 0.0, 0.0, 0.0, True)
    if not 0 < totals.counted < math.inf:  # a count of NaN neither
        raise StepError(
            given=f"a global batch of {size} samples",
            found=f"its losses report a count of {totals.counted:g} in total, so their mean does not "
            "exist; the parameters were not touched",
            fix="drop samples without targets from the dataset, or return the number of samples: "
            "(loss_sum, len(batch[1]))",
        )
    correction = size / (totals.counted * scale)
    norm = totals.norm * correction
    loss = totals.loss_sum / totals.counted
    factor = correction
    if clip is not None:
        factor *= min(1.0, clip / (norm + 1e-6))
    finite = math.isfinite(norm) and math.isfinite(loss)
    return Correction(loss, norm, totals.counted, factor, finite)


def check_clip(clip: float | None) -> float | None:
    """`clip` if gradients can be clipped to it."""
    if clip is not None and not (is_number(clip) and clip > 0):
        raise StepError(
            given=f"clip={clip!r}",
            found="the maximum gradient norm is a positive number",
            fix="clip=1.0, or leave it out",
        )
    return clip


class Strategy(Protocol):
    """Frozen options for one way of spreading a model; `apply` brings them to life."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the layout that it serves, or refuses with a reason of its own."""
        ...

    @property
    def defers(self) -> bool:
        """Whether it takes a model on the meta device, gives it memory, and lets others fill it."""
        ...

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Spread `model` over `world` in place, its names unchanged, and return what runs it.

        Moves to `world.device` what this rank keeps, which need not be the whole model.
        """
        ...


@runtime_checkable
class Spreading(Protocol):
    """What changes a model and leaves the gradients, and the engine, to the strategy after it."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the layout that it serves, if any."""
        ...

    def spread(self, model: nn.Module, world: World) -> None:
        """Change `model` in place, its names unchanged."""
        ...


class Engine(ABC):
    """The live counterpart of a Strategy: executes what Step orders, and owns what only it can.

    After each `gradients`, whatever it came to, exactly one of `update` and `discard` follows on every
    rank, so that both may be collective and may count. State never depends on the rank, but for which
    part of the model it holds; what differs in between, `synchronize` makes the same.
    """

    module: nn.Module
    """The user's own module."""
    world: World
    strategy: str = ""
    """The strategy that it was made by, as text."""
    loop: LoopGradients | None = None
    """The gradients of the user's own loop; None where such a loop can't drive the engine."""
    reports_loss: bool = True
    """Whether this rank's output, and the loss of it, count: of the ranks that share samples exactly
    one reports, or each for its slice of them. Elsewhere `infer` may return None."""
    flops_unknown: str = ""
    """Why FLOPs can't be counted from where the step is taken; empty where they can."""
    independent_steps: bool = False
    """Whether each rank takes its own steps, so that one may fail where the others have stepped."""
    division_reported: bool = False
    """Whether the layers have been named whose numbers depend on the division of the batch."""
    noise_stream: str = "noise"
    """The stream of random numbers that this rank's forward draws from; see `World.reseed`."""

    @abstractmethod
    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Forward and backward of the whole batch.

        Afterwards the gradients of the parameters that this rank holds are those of
        `scale * loss_sum / batch.size` summed over the world, and no other module's have changed.
        `autocast` is the dtype of mixed precision, None for none. Entered in FORWARD of the
        `world.timeline`, it enters BACKWARD and, before the sums, UPDATE. Collective.
        """

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply the gradients by `factor`, take one optimizer step, clear the gradients.

        With a factor of 0 (see `correct`) parameters and moments stay as they are.
        """

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients without a step."""

    @abstractmethod
    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the model's output on one micro-batch, without gradients. Collective.

        It may be None on a rank that does not report the loss.
        """

    def move_targets(self, output: Any, micro: Micro) -> Micro:
        """Return the micro-batch on the device of the output, where the loss needs it."""
        return micro

    @abstractmethod
    def compile(self, how: str) -> None:
        """Run the forward compiled: "inductor" or "script"."""

    def compile_with(self, compiler: Compiler) -> None:
        """Run the forward compiled by `compiler`, wherever the module is called.

        For a model that is given as `torch.compile(model)`, with the backend and options of that call.
        """
        raise compiles_parts(self.module, self.world)

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:  # noqa: B027 - nothing may differ
        """Make buffers, parameters and optimizer state that differ between ranks the same.

        Called before evaluating, where the optimizer may be unknown, and before state is taken.
        Collective.
        """

    def state(self) -> dict[str, Any]:
        """Return what has to be kept besides the module's and the optimizer's state; usually nothing.

        The same on all ranks, so that any number of them can take it back.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - keeping nothing is normal
        """Take back what `state` returned."""


class StepCounter(Protocol):
    """Counts the optimizer steps of a loop that calls `batch.backward`."""

    def check_loop(self) -> None:
        """Raise StepError if it has options that such a loop ignores."""

    def try_loss(self, batch: Batch) -> None:
        """Check on the first batch that the loss adds up, if it has a loss function. Collective."""

    def count(self, result: StepResult) -> StepResult:
        """Count an optimizer step that came to `result`, and return it."""
        ...


class LoopGradients(ABC):
    """The gradients of a model that the user's own loop trains, one micro-batch at a time.

    Nothing reports to it that the optimizer of such a loop has stepped, and it raises where the loop
    steps or clears gradients at the wrong time. An engine that must know of each step has none.
    """

    def __init__(self) -> None:
        self._counters: list[weakref.ref[StepCounter]] = []

    def count_in(self, counter: StepCounter) -> None:
        """Let `counter` count the batches for which a loop calls `batch.finish` from now on."""
        self._counters = [reference for reference in self._counters if reference() is not None]
        self._counters.append(weakref.ref(counter))

    @property
    def counters(self) -> list[StepCounter]:
        """What counts the batches that are finished on this model, oldest first."""
        return [counter for reference in self._counters if (counter := reference()) is not None]

    @abstractmethod
    def begin(self) -> None:
        """Prepare for the first `batch.backward` of a batch.

        Forgets a batch that the loop skipped: one whose gradients were cleared, and after which no
        optimizer has stepped. Raises StepError where a batch was neither skipped nor finished, where
        its gradients were not cleared after `batch.finish`, and where they were cleared before the
        optimizer stepped.
        """

    @abstractmethod
    def backward(self, loss: Tensor, count: Count, micro: Micro, size: int, *, last: bool) -> None:
        """Run backward for one micro-batch of a global batch of `size`; reduce over ranks if `last`.

        Adds to the gradients of this engine's module and of no other, though the loss may have run
        through others (a GAN's). After the last one only `batch.finish` may change the gradients.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise StepError where the loop has changed or used the gradients before `batch.finish`."""

    @abstractmethod
    def totals(self) -> Totals:
        """Return the sums of the batch whose last backward has run, and the norm of its gradients."""

    @abstractmethod
    def finish(self, factor: float) -> None:
        """Multiply the gradients by `factor`, which makes them those of the mean.

        The optimizer step comes next.
        """


def compiles_parts(module: nn.Module, world: World) -> StepError:
    """Return the error of a model given as `torch.compile(model)` that is compiled in parts."""
    return StepError(
        given=f"torch.compile({type(module).__name__}) and {world.layout}",
        found="its strategy compiles the parts of a model, not the whole",
        fix="shoal.parallelize(model, world) of the bare model; then shoal.Step(model, …, "
        "compile='inductor'), or torch.compile(model) in your own loop",
    )


def no_gradient() -> StepError:
    """Return the error of a loss that no backward can start from."""
    return StepError(
        given="the loss of a micro-batch",
        found="it does not depend on any trainable parameter",
        fix="compute it from the model's output, without .detach(), .item() or no_grad()",
    )
