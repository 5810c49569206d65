"""The trial of a loss before the first step: is it of the right form, and a sum rather than a mean?"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ShoalError, StepError
from shoal.task import Batch, Engine, Micro, Task, place

TOLERANCE = 0.02
"""Relative to the largest of the losses compared: sums in half precision are that far off."""

Sum: TypeAlias = tuple[float, float]
"""(loss sum, count) of some samples."""


def check_loss_adds_up(
    engine: Engine, task: Task, batch: Batch, *, autocast: torch.dtype | None
) -> None:
    """Refuse a loss that is no (sum, count), or whose sum is a mean. Collective.

    The loss of a rank's first micro-batch is compared with those of its halves. The model runs in
    eval mode, without gradients, and random states and modes are put back, so that nothing else
    changes. What can't be cut in halves passes. Raises ShoalError on all ranks if on any.
    """
    error: ShoalError | None = None
    try:
        with ExitStack() as aside:
            aside.enter_context(torch.no_grad())
            aside.enter_context(_random_states_kept(engine.module))
            for one in engine.world.engines:  # a GAN's loss runs through the other model
                aside.enter_context(evaluation(one.module))
            _examine(engine, task, batch, autocast)
    except ShoalError as caught:
        error = caught
    except Exception:
        # The step meets it again if it is real; then its traceback is the one that helps.
        error = None
    errors = engine.world.gather(error)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            found = f"on rank {rank}: {other.found}"
            raise type(other)(given=other.given, found=found, fix=other.fix)


def is_mean(whole: float, halves: tuple[Sum, Sum], samples: tuple[int, int]) -> bool:
    """Whether `whole` is the mean of the losses of its halves and not their sum.

    A mean weighs halves by samples or by counts. False wherever that can't be known, as for losses
    that couple samples (contrastive ones), which are neither.
    """
    (first, first_count), (second, second_count) = halves
    tolerance = TOLERANCE * max(abs(whole), abs(first), abs(second))
    if not math.isfinite(tolerance) or abs(whole - (first + second)) <= tolerance:
        return False
    for one, other in (samples, (first_count, second_count)):
        total = one + other
        if total and abs(whole - (one * first + other * second) / total) <= tolerance:
            return True
    return False


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode that it was found in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _examine(engine: Engine, task: Task, batch: Batch, autocast: torch.dtype | None) -> None:
    micro = batch.micros[0]

    def run(part: Micro) -> Any:
        return engine.infer(task, part, batch.seed, autocast=autocast)

    def reduce(part: Micro, output: Any) -> Sum:
        loss, count = task.reduce(output, part, batch.seed)
        return float(loss), float(count)

    output = run(micro)
    whole, _ = reduce(micro, output)
    if micro.samples < 2:
        return
    middle = micro.samples // 2
    rows = (slice(0, middle), slice(middle, micro.samples))
    halves: list[Sum] = []
    # A loss may fail on halves, which is its own business.
    with suppress(Exception):
        parts = [_part(micro, some) for some in rows]
        with suppress(Exception):
            # Cutting the output is exact even where the model draws noise.
            cut = [_cut(output, some, micro.samples) for some in rows]
            halves = [reduce(*pair) for pair in zip(parts, cut, strict=True)]
        if not halves:
            # Models that return their loss, or objects of their own, have to run again.
            halves = [reduce(part, run(part)) for part in parts]
    if halves and is_mean(whole, (halves[0], halves[1]), (parts[0].samples, parts[1].samples)):
        raise StepError(
            given=f"the loss function {place(task.loss)}: {whole:.6g} for {micro.samples} samples",
            found=f"its halves give {halves[0][0]:.6g} and {halves[1][0]:.6g}: it is a mean, not a sum",
            fix="reduction='sum' in the loss function, with the number of samples as the count; where "
            "the model itself returns a mean: return output.loss * n, n",
        )


@contextmanager
def _random_states_kept(model: nn.Module) -> Iterator[None]:
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _part(micro: Micro, rows: slice) -> Micro:
    value = _cut(micro.value, rows, micro.samples)
    return Micro(value, micro.first + rows.start, rows.stop - rows.start, micro.weight)


def _cut(value: Any, rows: slice, size: int) -> Any:
    """Some samples of tensors and arrays in tuples, lists and dicts; ValueError for anything else."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == size:
        return value[rows]
    if type(value) is dict:
        return {key: _cut(item, rows, size) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, rows, size) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_cut(item, rows, size) for item in value)
    if value is None:
        return None
    raise ValueError(f"no samples to choose in a {type(value).__name__}")
