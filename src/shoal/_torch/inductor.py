"""Private parts of inductor: loops for further operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch

Element = Callable[..., "LoopValue"]
"""Called with the words of a row of the table, the indices of row and column, and the option."""


class LoopValue:
    """An int64 number in a loop that inductor generates, with the operators of a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, operation: str, other: LoopValue | int) -> LoopValue:
        from torch._inductor.virtualized import ops

        value = other.value if isinstance(other, LoopValue) else ops.constant(other, torch.int64)
        return LoopValue(getattr(ops, operation)(self.value, value))

    __add__ = partialmethod(_with, "add")
    __sub__ = partialmethod(_with, "sub")
    __mul__ = partialmethod(_with, "mul")
    __and__ = partialmethod(_with, "bitwise_and")
    __or__ = partialmethod(_with, "bitwise_or")
    __xor__ = partialmethod(_with, "bitwise_xor")
    __rshift__ = partialmethod(_with, "bitwise_right_shift")


def generate_loop(
    operation: Any, element: Element, result: Callable[[Any], tuple[torch.dtype, float]]
) -> bool:
    """Let inductor generate a loop for an operation, which it fuses with others, in place of a call.

    The arguments of the operation are a table of dtype int64, the number of a row of it, an option, and
    the shape of its result, two numbers. `result(option)` returns the dtype of the result and the unit
    of its integers. Return False if this torch lacks a name for it, and the operation is called.
    """
    try:
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False

    def lower(table: Any, row: int, option: Any, rows: Any, columns: Any) -> Any:
        load = table.make_loader()
        dtype, unit = result(option)

        def loop(index: Any) -> Any:
            entry = [LoopValue(load([row, place])) for place in range(3)]
            places = [LoopValue(ops.index_expr(each, torch.int64)) for each in index]
            value = ops.to_dtype(element(entry, *places, option).value, dtype)
            return value if unit == 1 else ops.mul(value, ops.constant(unit, dtype))

        return Pointwise.create(
            device=table.get_device(), dtype=dtype, inner_fn=loop, ranges=[rows, columns]
        )

    register_lowering(operation, type_promotion_kind=None)(lower)
    return True
