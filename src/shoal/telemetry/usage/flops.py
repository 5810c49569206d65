"""The number of floating-point operations of a step, by the formulas of torch's FlopCounterMode.

They are counted in one real step, whose operations pass through a dispatch mode. Nothing is computed
for it, so neither gradients nor buffers nor random states can differ. torch's own mode also adds hooks
to every module and the graph, and an operation that its formula does not fit makes the step fail.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shoal._torch.dispatch import UncompiledMode, overloads_of

_ON_CPU = "_for_cpu"


def flop_formula(operator: Any) -> Callable[..., Any] | None:
    """Return torch's formula for the FLOPs of an operator, or None if there is none.

    The arguments of fused attention on the CPU, which lacks a formula, begin with those of the GPU's.
    """
    packet = overloads_of(operator)
    name = str(packet).rpartition(".")[2]
    if name.endswith((_ON_CPU, f"{_ON_CPU}_backward")):
        packet = getattr(torch.ops.aten, name.replace(_ON_CPU, ""))
    found: Callable[..., Any] | None = flop_registry.get(packet)
    return found


class FlopCounting:
    """A counter of the operations inside a context, entered once, by the step to be counted.

    `flops` is None before that, and if an operation could not be counted.
    """

    def __init__(self) -> None:
        self.flops: int | None = None
        self.failed: str | None = None
        self._mode = _FlopMode()

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self.failed = self._mode.failed
        self.flops = None if self.failed else self._mode.flops


class _FlopMode(UncompiledMode):
    """A mode below autograd, where composite operations are already decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.failed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        formula = flop_formula(func)
        if formula is not None:
            try:
                self.flops += int(formula(*args, **named, out_val=out))
            except Exception as error:  # an error in a formula must not fail the step
                self.failed = f"{func}: {type(error).__name__}: {error}"
        return out
