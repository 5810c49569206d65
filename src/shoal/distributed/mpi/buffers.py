"""Tensors in the form that MPI takes: address, count and type."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.util.errors import ShoalError

Spec = list[Any]
"""The arguments of mpi4py: memory, count or (counts, displacements), and type."""

_MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
"""Types for data that is only moved, by the size of the elements."""

_INTEGERS = {
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
_TYPES = {torch.bool: MPI.C_BOOL, **_INTEGERS, **_FLOATS, **_COMPLEX}
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""MPI can't sum these; they are summed in the wider one, and rounded once."""

_MOST = 2**31 - 1 if MPI.Get_version() < (4, 0) else sys.maxsize
"""Largest number of elements in one call."""

_SUMS = {"SUM": MPI.SUM, "AVG": MPI.SUM, "PRODUCT": MPI.PROD}
_ORDERED = {**_SUMS, "MIN": MPI.MIN, "MAX": MPI.MAX}
_BITS = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
_LOGICAL = {"SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "BXOR": MPI.LXOR}
_LOGICAL |= dict.fromkeys(("PRODUCT", "MIN", "BAND"), MPI.LAND)
_OPERATIONS: dict[torch.dtype, dict[str, MPI.Op]] = {
    torch.bool: _LOGICAL,
    **dict.fromkeys(_INTEGERS, _ORDERED | _BITS),
    **dict.fromkeys(_FLOATS, _ORDERED),
    **dict.fromkeys(_COMPLEX, _SUMS),
}


def checked(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient, if MPI can send it. Raises ShoalError otherwise."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        layout = str(tensor.layout).removeprefix("torch.")
        raise ShoalError(
            given=f"a {layout} tensor on {tensor.device} in a collective of the backend mpi",
            found="it sends dense tensors in host memory only",
            fix="call tensor.to_dense() or tensor.cpu() before it, or use another backend",
        )
    return tensor.detach()


def flat(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous, else a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def reducible(tensor: Tensor) -> Tensor:
    """Return the contiguous tensor in a dtype that MPI can sum."""
    return flat(tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)))


def moved(tensor: Tensor, count: int | None = None) -> Spec:
    """Return a flat tensor for MPI to move; `count` is the number of its elements per rank."""
    return [_memory(tensor), _counted(tensor.numel() if count is None else count), kind(tensor)]


def parts(tensor: Tensor, counts: Sequence[int]) -> Spec:
    """Return a flat tensor for MPI to move in parts of these sizes, one per rank."""
    starts = list(accumulate(counts, initial=0))[:-1]
    _counted(max((*counts, *starts)))
    return [_memory(tensor), (list(counts), starts), kind(tensor)]


def reduced(tensor: Tensor, count: int | None = None) -> Spec:
    """Return a flat tensor for MPI to reduce; `count` is the number of its elements per rank."""
    whole = _counted(tensor.numel() if count is None else count)
    return [_memory(tensor), whole, _TYPES[tensor.dtype]]


def _counted(count: int) -> int:
    """Return the count if this MPI can pass that many elements. Raises ShoalError otherwise."""
    if count > _MOST:
        raise ShoalError(
            given=f"{count:,} elements in one call of the backend mpi",
            found=f"MPI before version 4 passes at most {_MOST:,} elements per call",
            fix="make one call for each part of tensor.split(2**30), or use MPI 4 or Gloo",
        )
    return count


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two flat tensors overlap in memory, which MPI forbids."""
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return begin < other.data_ptr() + other.nbytes and other.data_ptr() < end


def operation(op: Any, dtype: torch.dtype) -> tuple[MPI.Op, bool]:
    """Return MPI's operation for one of torch's on tensors of a dtype, and whether it is a mean.

    Raises ShoalError if there is none.
    """
    known = [name for name in (*_ORDERED, *_BITS) if op == getattr(dist.ReduceOp, name)]
    name = known[0] if known else str(op)
    usable = _OPERATIONS.get(_WIDER.get(dtype, dtype), {})
    if name not in usable:
        raise ShoalError(
            given=f"ReduceOp.{name} of {dtype}",
            found=f"MPI reduces this dtype by {', '.join(usable) or 'no operation'}",
            fix="use another operation or dtype, or backend='gloo'",
        )
    return usable[name], name == "AVG"


def divide(tensor: Tensor, size: int) -> None:
    """Divide a sum in place to get the mean; integers are rounded towards zero."""
    tensor.div_(size, rounding_mode="trunc" if tensor.dtype in _INTEGERS else None)


def _memory(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def kind(tensor: Tensor) -> MPI.Datatype:
    """Return the MPI type that moves a tensor's elements."""
    return _MOVED[tensor.element_size()]
