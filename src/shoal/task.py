"""What a user computes from a batch, as functions of plain values that any strategy can run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError, StepError

if TYPE_CHECKING:
    from shoal.world import World

Count: TypeAlias = "int | float | Tensor"
"""How many samples or tokens a sum was taken over; a tensor where only the data knows."""


class Noise:
    """Random numbers that belong to samples: row i depends on (seed, position of sample i) alone.

    They are the same at any number of ranks, micro-batches and workers; numbers from a global
    generator are not. The `inputs` and the `loss` of a Task draw from two independent streams. `named`
    gives both the same numbers, for a loss that needs the numbers that `inputs` drew. Counter-based
    generation: Philox (Salmon et al. 2011), one generator per position, whose counter begins at
    `stream`.

        >>> both, second = Noise(0, first=6, samples=2), Noise(0, first=7, samples=1)
        >>> bool((both.normal(3)[1] == second.normal(3)[0]).all())
        True
        >>> inputs, loss = Noise(0, first=6, samples=2), Noise(0, first=6, samples=2, stream=1)
        >>> bool((inputs.normal(3) == loss.normal(3)).any())
        False
        >>> bool((inputs.named("added").normal(3) == loss.named("added").normal(3)).all())
        True
    """

    __slots__ = ("_generators", "first", "samples", "seed", "stream")

    def __init__(self, seed: int, first: int, samples: int, *, stream: int = 0) -> None:
        self.seed = seed
        self.first = first
        self.samples = samples
        self.stream = stream
        self._generators: list[np.random.Generator] | None = None

    def named(self, name: str) -> Noise:
        """The stream of this name, from its beginning: the same numbers wherever it is asked for.

        Streams of different names are independent, and so is each of what the Noise itself draws.
        Raises StepError for a name that is not text.
        """
        if not isinstance(name, str):
            raise StepError(
                given=f"noise.named({name!r})",
                found="a stream is named by text",
                fix="noise.named('added').normal(8)",
            )
        digest = hashlib.sha256(name.encode()).digest()
        # The highest bit keeps them apart from the numbered streams.
        stream = int.from_bytes(digest[:8], "big") | 1 << 63
        return Noise(self.seed, self.first, self.samples, stream=stream)

    def generators(self) -> list[np.random.Generator]:
        """One NumPy generator per sample of the micro-batch, in its order; each call goes on."""
        if self._generators is None:
            keys = np.empty((self.samples, 2), np.uint64)
            keys[:, 0] = self.seed & _MASK
            keys[:, 1] = np.arange(self.first, self.first + self.samples)
            counter = np.array(
                [0, 0, 0, self.stream], np.uint64
            )  # the highest word: draws count up from the lowest
            self._generators = [
                np.random.Generator(np.random.Philox(key=key, counter=counter)) for key in keys
            ]
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
    part in the collectives of the step. `world` are the processes that share the global batch, None
    where nobody does.
    """

    value: Any
    first: int
    samples: int
    weight: float
    world: World | None = None


UNDER_WAY: ContextVar[Micro | None] = ContextVar("micro-batch under way", default=None)
"""What a Task's functions are being called on, for those that talk to other ranks (`shoal.gather`)."""


@dataclass(frozen=True)
class Task:
    """What to compute, as two functions of plain values, so that any strategy can run it.

    `loss(output, batch)` returns (sum, count): the *sum* of the losses of the samples as a tensor
    without dimensions, and what to divide the sum over the global batch by. `inputs(batch)` returns
    what the model is called with: a tuple for positional arguments, a mapping for keywords, anything
    else as the only argument. Without it, a tuple or list gives its first element and a mapping is
    passed as keywords. A function that has a parameter named `noise` gets the Noise of its samples;
    those of `inputs` and `loss` draw different numbers, except from `noise.named(…)`.

        >>> def loss(output, batch):
        ...     return torch.nn.functional.mse_loss(output, batch["y"], reduction="sum"), len(output)
        >>> task = Task(loss, inputs=lambda batch: batch["x"])
    """

    loss: Callable[..., tuple[Tensor, Count]]
    inputs: Callable[..., Any] | None = None

    def forward(self, model: Callable[..., Any], micro: Micro, seed: int) -> Any:
        """Call `model` on a micro-batch and return its output."""
        token = UNDER_WAY.set(micro)
        try:
            positional, named = self.arguments(micro, seed)
            return model(*positional, **named)
        finally:
            UNDER_WAY.reset(token)

    def arguments(self, micro: Micro, seed: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What the model is called with: positional arguments and keywords."""
        if self.inputs is None:
            arguments = default_inputs(micro.value)
        elif self._inputs_take_noise:
            arguments = self.inputs(micro.value, noise=Noise(seed, micro.first, micro.samples))
        else:
            arguments = self.inputs(micro.value)
        if isinstance(arguments, tuple):
            return arguments, {}
        if isinstance(arguments, Mapping):
            return (), arguments
        return (arguments,), {}

    def reduce(self, output: Any, micro: Micro, seed: int) -> tuple[Tensor, Count]:
        """The loss of a micro-batch as (sum, count), checked to be of that form."""
        token = UNDER_WAY.set(micro)
        try:
            if self._loss_takes_noise:
                noise = Noise(seed, micro.first, micro.samples, stream=1)
                result = self.loss(output, micro.value, noise=noise)
            else:
                result = self.loss(output, micro.value)
        finally:
            UNDER_WAY.reset(token)
        return check_loss(result, self.loss)

    @cached_property
    def _inputs_take_noise(self) -> bool:
        return self.inputs is not None and _takes_noise(self.inputs)

    @cached_property
    def _loss_takes_noise(self) -> bool:
        return _takes_noise(self.loss)


def check_loss(
    result: object, function: Callable[..., object] | None = None, *, call: str = ""
) -> tuple[Tensor, Count]:
    """`result` as (sum, count), or a StepError that says what it is instead.

    `function` is the loss function that returned it; None where your own loop computed it, and gave
    it in `call`.
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
    total = "F.cross_entropy(output, y, reduction='sum')"
    raise StepError(
        given=call if function is None else f"the loss function {place(function)}",
        found=found if function is None else f"it returned {found}",
        fix=f"batch.backward(total={total}, count=len(y))"
        if function is None
        else f"return {total}, len(y)",
    )


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
