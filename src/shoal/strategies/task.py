"""Task: the inputs of the model and the loss, as functions of plain values that any strategy runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from shoal.data.batch import Count
from shoal.data.micro import CURRENT_DRAWS, CURRENT_MICRO, Drawing, Draws, MicroBatch
from shoal.util.errors import DataError, StepError

_LOSSES_OF_TORCH = ("torch.nn.functional", "torch.nn.modules.loss")


@dataclass(frozen=True)
class Task:
    """The computation of a step: the inputs of the model, and the loss as (sum, count).

    If a function has a parameter `noise`, Shoal passes it the `Noise` of the samples. `loss` and
    `inputs` draw different numbers, except from `noise.named(…)`.

    Args:
        loss: `loss(output, batch)` returns (sum, count): the *sum* of the losses of the samples, a
            0-dimensional tensor, and the divisor, a number of samples or tokens. The loss of a step is
            the sum over the global batch, divided by the count over the global batch.
        inputs: `inputs(batch)` returns the arguments of the model: a tuple for positional arguments, a
            mapping for keyword arguments, any other value as the only argument. None passes the first
            element of a tuple or list, or the entries of a mapping as keyword arguments. Default: None.
        depends_on_batch: Whether the loss of a sample may depend on the other samples of its
            micro-batch, as in Dice, triplet and in-batch-negative losses. Results then depend on the
            numbers of processes and micro-batches, unless `shoal.gather` returns the rows of all ranks.
            Losses with `shoal.gather` don't need it. Default: False, and the first step raises an
            error for such a loss.

    Raises:
        StepError: If an argument is not callable, or `loss` is a loss of PyTorch itself.

    Examples:
        >>> from torch.nn.functional import mse_loss
        >>> def loss(output, batch):
        ...     return mse_loss(output, batch["y"], reduction="sum"), len(output)
        >>> task = shoal.Task(loss, inputs=lambda batch: batch["x"])
    """

    loss: Callable[..., tuple[Tensor, Count]]
    inputs: Callable[..., Any] | None = None
    depends_on_batch: bool = False

    def __post_init__(self) -> None:
        for name, value in (("loss", self.loss), ("inputs", self.inputs)):
            if not callable(value) and not (name == "inputs" and value is None):
                raise StepError(
                    given=f"shoal.Task({name}={type(value).__name__})",
                    found=f"{name} must be a function",
                    fix="use shoal.Task(loss), where loss(output, batch) returns (sum, count)",
                )
        if getattr(self.loss, "__module__", None) in _LOSSES_OF_TORCH:
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            raise StepError(
                given=f"shoal.Task({name})",
                found="it takes (output, target) and returns a loss; the loss function of a Task takes "
                "(output, batch) and returns (sum, count)",
                fix="def loss(output, batch): return F.cross_entropy(output, batch[1], "
                "reduction='sum'), len(batch[1])",
            )

    def forward(self, model: Callable[..., Any], micro: MicroBatch, seed: int) -> Any:
        """Call `model` on a micro-batch and return its output.

        Args:
            model: The model, or a function that is called in its place.
            micro: The micro-batch.
            seed: Seed of the `Noise` of the samples.

        Returns:
            The output of the model.
        """
        with _Current(micro, Draws(micro, seed)):
            positional, named = self.arguments(micro, seed)
            return model(*positional, **named)

    def arguments(self, micro: MicroBatch, seed: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the positional and keyword arguments of the model for a micro-batch."""
        if self.inputs is None:
            arguments = default_inputs(micro.value)
        else:
            noise = {}
            if self._inputs_take_noise:
                noise["noise"] = micro.noise(seed)
            # Counted apart from the model's: a stage of a pipeline may run without these inputs.
            with Drawing(Draws(micro, seed, "inputs ", self)):
                arguments = self.inputs(micro.value, **noise)
        if isinstance(arguments, tuple):
            return arguments, {}
        if isinstance(arguments, Mapping):
            return (), arguments
        return (arguments,), {}

    def reduce(self, output: Any, micro: MicroBatch, seed: int) -> tuple[Tensor, Count]:
        """Return the loss of a micro-batch as (sum, count). Raise StepError for another form."""
        with _Current(micro, Draws(micro, seed, "loss ", self)):
            if self._loss_takes_noise:
                result = self.loss(output, micro.value, noise=micro.noise(seed, stream=1))
            else:
                result = self.loss(output, micro.value)
        return check_loss(result, self.loss)

    @cached_property
    def _inputs_take_noise(self) -> bool:
        return self.inputs is not None and _takes_noise(self.inputs)

    @cached_property
    def _loss_takes_noise(self) -> bool:
        return _takes_noise(self.loss)


class _Current:
    """The context of a call of a Task function: its micro-batch, and the draws so far."""

    __slots__ = ("_draws", "_micro", "_tokens")
    _tokens: tuple[Token[MicroBatch | None], Token[Draws | None]]

    def __init__(self, micro: MicroBatch, draws: Draws) -> None:
        self._micro = micro
        self._draws = draws

    def __enter__(self) -> None:
        self._tokens = CURRENT_MICRO.set(self._micro), CURRENT_DRAWS.set(self._draws)

    def __exit__(self, *_: object) -> None:
        micro, draws = self._tokens
        CURRENT_MICRO.reset(micro)
        CURRENT_DRAWS.reset(draws)


def check_loss(
    result: object, function: Callable[..., object] | None = None, *, call: str = ""
) -> tuple[Tensor, Count]:
    """Return `result` as (sum, count), or raise StepError if it has another form.

    `function` is the loss function that returned it. It is None if a custom training loop computed
    the loss and passed it in `call`.
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
            found = f"a loss of shape {tuple(loss.shape)} instead of a 0-dimensional tensor"
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
    """Return the arguments of the model for a task without `inputs`."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list) and value:
        return (value[0],)
    raise DataError(
        given=f"batches of type {type(value).__name__} and a Task without `inputs`",
        found="a batch that is neither a tuple nor a mapping does not define the inputs of the model",
        fix="pass shoal.Task(loss, inputs=lambda batch: batch), or a function that returns the inputs",
    )


def place(function: Callable[..., object]) -> str:
    """Return the name of a function and its place in the source."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def _takes_noise(function: Callable[..., Any]) -> bool:
    try:
        return "noise" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
