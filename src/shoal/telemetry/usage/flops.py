"""How many floating-point operations a step takes, by the formulas of torch's FlopCounterMode.

Counted in one real step, whose operations pass by a dispatch mode on their way: nothing is computed
for it, so neither gradients nor buffers nor random states can differ. torch's own mode also hangs hooks
into every module and the graph, and lets an operation that its formula does not fit fail the step.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.utils.flop_counter import flop_registry

from shoal._torch.dispatch import UncompiledMode, overloads_of


class Counting:
    """Counts what is computed inside of it; entered once, by the step that is counted.

    `flops` are None before that, and where an operation could not be counted.
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
    """Below autograd, where composite operations have been taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.failed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        formula = flop_registry.get(overloads_of(func))
        if formula is not None:
            try:
                self.flops += int(formula(*args, **named, out_val=out))
            except Exception as error:  # the step itself is none of the formula's business
                self.failed = f"{func}: {type(error).__name__}: {error}"
        return out
