"""The contracts: what a user computes (Task), on what (Batch), and who executes it (Engine).

Everything above this file talks through these few types, so a strategy is two classes: frozen options
with `apply`, and an engine.
"""

from __future__ import annotations

import gc
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import DataError, StepError

if TYPE_CHECKING:
    from shoal.world import World

Count: TypeAlias = "int | float | Tensor"
"""How many samples or tokens a sum was taken over; a tensor where only the data knows."""


class Noise:
    """Random numbers that belong to samples: row i depends on (seed, position of sample i) alone.

    The same at any number of ranks, micro-batches and workers, which noise from a global generator
    is not. Counter-based generation: Philox (Salmon et al. 2011), one stream per position.
    """

    __slots__ = ("_generators", "first", "samples", "seed")

    def __init__(self, seed: int, first: int, samples: int) -> None:
        self.seed = seed
        self.first = first
        self.samples = samples
        self._generators: list[np.random.Generator] | None = None

    def generators(self) -> list[np.random.Generator]:
        """One NumPy generator per sample of the micro-batch, in its order; each call goes on."""
        if self._generators is None:
            keys = np.empty((self.samples, 2), np.uint64)
            keys[:, 0] = self.seed & _MASK
            keys[:, 1] = np.arange(self.first, self.first + self.samples)
            self._generators = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
        return self._generators

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers on the CPU, shape (samples, *shape)."""
        rows = [generator.standard_normal(shape) for generator in self.generators()]
        return torch.from_numpy(np.stack(rows)).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers uniform in [0, 1) on the CPU, shape (samples, *shape)."""
        rows = np.stack([generator.random(shape) for generator in self.generators()])
        grain = torch.finfo(dtype).eps / 2  # between numbers below 1; without it some round up to 1
        return torch.from_numpy(np.floor(rows / grain) * grain).to(dtype)


_MASK = 2**64 - 1


class Micro(NamedTuple):
    """One micro-batch of one rank.

    `value` is what the dataset and the collate function made of `samples` samples from position
    `first` on. `weight` is 1, or 0 for the stand-in that a rank without samples runs in order to take
    part in the collectives of the step.
    """

    value: Any
    first: int
    samples: int
    weight: float


class Totals(NamedTuple):
    """What one global batch came to, as plain numbers, the same on all ranks.

    `loss_sum` and `counted` are sums over the global batch. `norm` is the L2 norm of the gradients as
    they stand: of `scale * loss_sum / batch.size`, before the correction by the true count.
    `forward` and `backward` are seconds on this rank.
    """

    loss_sum: float
    counted: float
    norm: float
    forward: float = 0.0
    backward: float = 0.0


class Correction(NamedTuple):
    """What to do with the gradients of a step: multiply them by `factor`, or skip if not `finite`."""

    loss: float
    norm: float
    factor: float
    finite: bool


def correct(totals: Totals, *, size: int, scale: float, clip: float | None) -> Correction:
    """Decide on one factor that corrects, unscales and clips the gradients of a step.

    Backward ran on `scale * loss_sum / size` with `size` known beforehand; the step minimises
    `loss_sum / count`. So the true gradients are `size / (count * scale)` times those that stand, and
    so is their norm; clipping multiplies by `min(1, clip / norm)` (Pascanu et al. 2013, with torch's
    1e-6 in the denominator).
    """
    if not totals.counted > 0:  # a count of NaN neither
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
    return Correction(loss, norm, factor, math.isfinite(norm) and math.isfinite(loss))


@dataclass(frozen=True)
class Task:
    """What to compute, as two functions of plain values, so that any strategy can run it.

    `loss(output, batch)` returns (sum, count): the *sum* of the losses of the samples as a tensor
    without dimensions, and what to divide the sum over the global batch by. `inputs(batch)` returns
    what the model is called with: a tuple for positional arguments, a mapping for keywords, anything
    else as the only argument. Without it, a tuple or list gives its first element and a mapping is
    passed as keywords. A function that has a parameter named `noise` gets the Noise of its samples.
    """

    loss: Callable[..., tuple[Tensor, Count]]
    inputs: Callable[..., Any] | None = None

    def forward(self, model: Callable[..., Any], micro: Micro, seed: int) -> Any:
        """Call `model` on a micro-batch and return its output."""
        if self.inputs is None:
            arguments = default_inputs(micro.value)
        elif self._inputs_take_noise:
            arguments = self.inputs(micro.value, noise=Noise(seed, micro.first, micro.samples))
        else:
            arguments = self.inputs(micro.value)
        if isinstance(arguments, tuple):
            return model(*arguments)
        if isinstance(arguments, Mapping):
            return model(**arguments)
        return model(arguments)

    def reduce(self, output: Any, micro: Micro, seed: int) -> tuple[Tensor, Count]:
        """The loss of a micro-batch as (sum, count), checked to be of that form."""
        if self._loss_takes_noise:
            noise = Noise(seed, micro.first, micro.samples)
            result = self.loss(output, micro.value, noise=noise)
        else:
            result = self.loss(output, micro.value)
        return check_loss(result, self.loss)

    @cached_property
    def _inputs_take_noise(self) -> bool:
        return self.inputs is not None and _takes_noise(self.inputs)

    @cached_property
    def _loss_takes_noise(self) -> bool:
        return _takes_noise(self.loss)


def check_loss(result: object, function: Callable[..., object] | None = None) -> tuple[Tensor, Count]:
    """`result` as (sum, count), or a StepError that says what it is instead.

    `function` is the loss function that returned it; None where a loop of one's own computed it.
    """
    if isinstance(result, tuple) and len(result) == 2:
        loss, count = result
        if isinstance(loss, Tensor) and loss.dim() == 0:
            if isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1):
                return loss, count
            if isinstance(count, np.number):
                return loss, count.item()
            shape = f" and shape {tuple(count.shape)}" if isinstance(count, Tensor) else ""
            found = f"a count of type {type(count).__name__}{shape} instead of one number"
        elif isinstance(loss, Tensor):
            found = f"a loss of shape {tuple(loss.shape)} instead of a tensor without dimensions"
        else:
            found = f"a loss of type {type(loss).__name__} instead of a tensor"
    else:
        of = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        found = f"a {type(result).__name__}{of} instead of a tuple of two, (sum, count)"
    example = "F.cross_entropy(output, y, reduction='sum'), len(y)"
    raise StepError(
        given="batch.backward(loss, count)"
        if function is None
        else f"the loss function {place(function)}",
        found=found if function is None else f"it returned {found}",
        fix=f"batch.backward({example})" if function is None else f"return {example}",
    )


def check_clip(clip: float | None) -> float | None:
    """`clip` if gradients can be clipped to it."""
    if clip is not None and not clip > 0:
        raise StepError(
            given=f"clip={clip}",
            found="the largest gradient norm allowed is a positive number",
            fix="clip=1.0, or leave it out",
        )
    return clip


def default_inputs(value: Any) -> Any:
    """What the model is called with where the task does not say."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list) and value:
        return (value[0],)
    raise DataError(
        given=f"batches of type {type(value).__name__} and a Task without `inputs`",
        found="it is neither a tuple nor a mapping, so what to call the model with can't be known",
        fix="shoal.Task(loss, inputs=lambda batch: batch), or whatever the model takes",
    )


def place(function: Callable[..., object]) -> str:
    """What a user calls his function, and where he wrote it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def _takes_noise(function: Callable[..., Any]) -> bool:
    try:
        return "noise" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class Batch:
    """One global batch as this rank sees it: its micro-batches, for `Step` or for a loop of one's own.

    `first` is the position of the global batch's first sample since the start of training, `size` how
    many samples it has over all ranks. A loop of one's own is as exact as `Step`:

        for micro in batch:
            batch.backward(*loss(model(micro[0]), micro))
        batch.finish(model, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    __slots__ = ("_backwards", "_current", "_world", "first", "micros", "seed", "size", "wait")

    def __init__(
        self,
        first: int,
        size: int,
        micros: Sequence[Micro],
        *,
        seed: int,
        wait: float = 0.0,
        world: World | None = None,
    ) -> None:
        self.first = first
        self.size = size
        self.micros = micros
        self.seed = seed
        self.wait = wait
        self._world = world
        self._current = -1
        self._backwards: list[OpenEngine] = []

    @property
    def share(self) -> tuple[int, int]:
        """The positions [start, stop) that this rank consumes; empty if it only stands in."""
        real = [micro for micro in self.micros if micro.weight]
        if not real:
            return self.first, self.first
        return real[0].first, real[-1].first + real[-1].samples

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self.micros)

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches as the collate function returned them."""
        for index, micro in enumerate(self.micros):
            self._current = index
            yield micro.value
        self._current = -1

    @property
    def micro(self) -> Micro:
        """The micro-batch that the loop `for … in batch` stands at, with its positions and weight."""
        if self._current < 0:
            raise StepError(
                given="batch.backward, batch.micro or batch.noise outside a loop over the batch",
                found="no micro-batch is under way",
                fix="for micro in batch: batch.backward(*loss(model(micro[0]), micro))",
            )
        return self.micros[self._current]

    @property
    def noise(self) -> Noise:
        """The per-position random numbers of the current micro-batch."""
        micro = self.micro
        return Noise(self.seed, micro.first, micro.samples)

    def backward(self, loss: Tensor, count: Count, model: nn.Module | None = None) -> None:
        """Backward of the current micro-batch; gradients are reduced over ranks after the last.

        `loss` is the sum over the micro-batch's samples, `count` what it was taken over. `model` is
        needed where several models have been parallelized, and names the one that learns.
        """
        micro = self.micro
        loss, count = check_loss((loss, count))
        engine = self._engine(model)
        last = self._current == len(self.micros) - 1
        engine.backward(loss, count, micro, self.size, scale=1.0, last=last)
        self._backwards.append(engine)

    def finish(self, model: nn.Module, *, clip: float | None = None) -> Correction:
        """Make the gradients those of `Σ loss / Σ count` over the global batch, and clip them.

        Returns the global mean loss and the gradient norm before clipping. Raises StepError when
        they are not finite; the parameters are untouched then, and the gradients dropped.
        """
        engine = self._engine(model)
        self._check_backwards(engine)
        check_clip(clip)
        engine.world.stepping()
        try:
            result = correct(engine.totals(), size=self.size, scale=1.0, clip=clip)
            if not result.finite:
                raise not_finite(result, self)
        except StepError:
            engine.discard()
            raise
        engine.multiply(result.factor)
        return result

    def _check_backwards(self, engine: OpenEngine) -> None:
        done = self._backwards.count(engine)
        self._backwards = [other for other in self._backwards if other is not engine]
        if done != len(self.micros):
            raise StepError(
                given=f"batch.finish(model) for {len(self.micros)} micro-batch(es)",
                found=f"batch.backward was called {done} times, not once for each",
                fix="for micro in batch: batch.backward(*loss(model(micro[0]), micro)), and add "
                "several losses of a model up before it",
            )

    def _engine(self, model: nn.Module | None) -> OpenEngine:
        engines = self._engines(model)
        if len(engines) > 1:
            del engines
            gc.collect()  # models that were dropped live on in reference cycles until now
            engines = self._engines(model)
        if len(engines) != 1:
            found = (
                f"{len(engines)} parallelized models"
                if engines
                else "the model given has no engine"
                if self._engines(None)
                else "no parallelized model"
            )
            raise StepError(
                given="a loop of one's own over a Batch",
                found=found,
                fix="batch.backward(loss, count, model) with model = shoal.parallelize(Model(), world)",
            )
        engine = engines[0]
        if not isinstance(engine, OpenEngine):
            raise StepError(
                given="a loop of one's own over a Batch",
                found=f"{type(engine).__name__} owns the backward pass",
                fix="step = shoal.Step(model, optimizer, task), then step(batch)",
            )
        return engine

    def _engines(self, model: nn.Module | None) -> list[Engine]:
        known = self._world.engines if self._world is not None else []
        return [engine for engine in known if model in (None, engine.module)]


def not_finite(result: Correction, batch: Batch) -> StepError:
    """The error of a step whose loss or gradients are not numbers."""
    what = "loss" if not math.isfinite(result.loss) else "gradient norm"
    value = result.loss if what == "loss" else result.norm
    start, stop = batch.share
    share = f"{start:,} to {stop - 1:,}" if stop > start else "none of them"
    return StepError(
        given=f"the batch at samples {batch.first:,} to {batch.first + batch.size - 1:,} "
        f"(this rank: {share})",
        found=f"a {what} of {value}, over all ranks; the parameters were not touched",
        fix="lower the learning rate, clip gradients (clip=1.0), or look at these samples with "
        "torch.autograd.set_detect_anomaly(True)",
    )


class Strategy(Protocol):
    """Frozen options for one way of spreading a model; `apply` brings them to life."""

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Spread `model` over `world` in place, its names unchanged, and return what runs it."""
        ...


class Engine(ABC):
    """The live counterpart of a Strategy: executes what Step orders, and owns what only it can."""

    module: nn.Module
    """The user's own module."""
    world: World

    @abstractmethod
    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Forward and backward of the whole batch.

        Afterwards the gradients are those of `scale * loss_sum / batch.size` summed over the world.
        `autocast` is the dtype of mixed precision, None for none. Collective.
        """

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply the gradients by `factor`, take one optimizer step, clear the gradients."""

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients without a step."""

    @abstractmethod
    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """The model's output on one micro-batch, without gradients. Collective."""

    @abstractmethod
    def compile(self, how: str) -> None:
        """Run the forward compiled: "inductor" or "script"."""

    def align(self) -> None:  # noqa: B027 - nothing that could differ is normal
        """Make buffers the same on all ranks; before evaluating and saving. Collective."""

    def state(self) -> dict[str, Any]:
        """What has to be kept besides the module's and the optimizer's state; usually nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - keeping nothing is normal
        """Take back what `state` returned."""


class OpenEngine(Engine):
    """An engine whose forward and backward the user may drive himself, one micro-batch at a time."""

    @abstractmethod
    def backward(
        self, loss: Tensor, count: Count, micro: Micro, size: int, *, scale: float, last: bool
    ) -> None:
        """Backward of one micro-batch of a global batch of `size`; reduce over ranks if `last`."""

    @abstractmethod
    def totals(self) -> Totals:
        """The sums of the batch whose last backward has run, and the norm of its gradients."""

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor`."""
