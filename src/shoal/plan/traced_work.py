"""The work of a step, by the operations that a trace runs: FLOPs, bytes and their number."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shoal._torch.dispatch import UncompiledMode, is_wrapper, overloads_of, tree_iter
from shoal.plan.layer_time import Work

_COLLECTIVES = ("c10d", "_c10d_functional")


class TracedWork(UncompiledMode):
    """Dispatch mode that adds up the work of the operations inside.

    A convolution counts as the matrix product into which it is rewritten (implicit GEMM), with its
    FLOPs by torch's formulas. An operation without a formula reads its arguments and writes its
    results. A Fourier transform does so once per dimension. Views and collectives are not counted.

    Attributes:
        work: The sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation and add its work."""
        if any(map(is_wrapper, types)):
            return NotImplemented
        named = named or {}
        result = function(*arguments, **named)
        if function.namespace not in _COLLECTIVES and not function.is_view:
            self.work += _work_of(function, arguments, named, result)
        return result


def _work_of(function: Any, arguments: Any, named: Any, result: Any) -> Work:
    moved = float(_bytes_in((arguments, named)) + _bytes_in(result))
    packet = overloads_of(function)
    formula = flop_registry.get(packet)
    name = str(packet).rpartition(".")[2]
    if formula is None:
        passes = len(arguments[1]) if name.startswith("_fft_") else 1
        return Work(traffic=passes * moved, operations=1)
    flops = float(formula(*arguments, **named, out_val=result))
    if "attention" in name:
        return Work(attention=flops, traffic=moved, operations=1)
    if "convolution" in name:
        return Work(convolutions=flops, product_bytes=moved, operations=1)
    return Work(products=flops, product_bytes=moved, operations=1)


def _bytes_in(values: Any) -> int:
    """Return the bytes of the elements of all tensors; those of an expanded one count once."""
    total = 0
    for each in tree_iter(values):
        if isinstance(each, Tensor):
            sizes = zip(each.shape, each.stride(), strict=True)
            total += each.element_size() * math.prod(size for size, stride in sizes if stride)
    return total
