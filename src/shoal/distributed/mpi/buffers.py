"""Tensors as MPI takes them: an address, a count and a type."""

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
"""What mpi4py takes: memory, count or (counts, displacements), and type."""

_MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
"""What is only moved goes by the size of its elements."""

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
"""MPI has no sums of these; they are summed in the wider one, and rounded once."""

_MOST = 2**31 - 1 if MPI.Get_version() < (4, 0) else sys.maxsize
"""So many elements can be counted."""

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
    """The values of a tensor, if they are where MPI can be sent to. Raises ShoalError."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        layout = str(tensor.layout).removeprefix("torch.")
        raise ShoalError(
            given=f"a {layout} tensor on {tensor.device} in a collective of the backend mpi",
            found="it sends dense tensors in the CPU's memory",
            fix="tensor.to_dense() or tensor.cpu() before it, or another backend",
        )
    return tensor.detach()


def flat(tensor: Tensor) -> Tensor:
    """The tensor itself where its elements follow each other in memory, else a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def reducible(tensor: Tensor) -> Tensor:
    """As `flat`, of a dtype that MPI has sums of."""
    return flat(tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)))


def moved(tensor: Tensor, count: int | None = None) -> Spec:
    """A flat tensor that MPI shall move; `count` is how many of its elements are one rank's."""
    return [_memory(tensor), _counted(tensor.numel() if count is None else count), kind(tensor)]


def parts(tensor: Tensor, counts: Sequence[int]) -> Spec:
    """A flat tensor that MPI shall move in parts of so many elements, one for each rank."""
    starts = list(accumulate(counts, initial=0))[:-1]
    _counted(max((*counts, *starts)))
    return [_memory(tensor), (list(counts), starts), kind(tensor)]


def reduced(tensor: Tensor, count: int | None = None) -> Spec:
    """A flat tensor that MPI shall reduce; `count` is how many of its elements are one rank's."""
    whole = _counted(tensor.numel() if count is None else count)
    return [_memory(tensor), whole, _TYPES[tensor.dtype]]


def _counted(count: int) -> int:
    """The count, if this MPI can be told of so many elements. Raises ShoalError."""
    if count > _MOST:
        raise ShoalError(
            given=f"{count:,} elements in one call of the backend mpi",
            found=f"an MPI before its version 4 counts to {_MOST:,}",
            fix="a call for each part of tensor.split(2**30), or an MPI of version 4, or Gloo",
        )
    return count


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors have memory in common, which MPI forbids."""
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return begin < other.data_ptr() + other.nbytes and other.data_ptr() < end


def operation(op: Any, dtype: torch.dtype) -> tuple[MPI.Op, bool]:
    """MPI's operation for one of torch's on such tensors, and whether it is a mean.

    Raises ShoalError where there is none.
    """
    known = [name for name in (*_ORDERED, *_BITS) if op == getattr(dist.ReduceOp, name)]
    name = known[0] if known else str(op)
    usable = _OPERATIONS.get(_WIDER.get(dtype, dtype), {})
    if name not in usable:
        raise ShoalError(
            given=f"ReduceOp.{name} of {dtype}",
            found=f"MPI reduces these by {', '.join(usable) or 'no operation'}",
            fix="another operation or dtype, or backend='gloo'",
        )
    return usable[name], name == "AVG"


def divide(tensor: Tensor, size: int) -> None:
    """From a sum to a mean, in place; of integers towards zero."""
    tensor.div_(size, rounding_mode="trunc" if tensor.dtype in _INTEGERS else None)


def _memory(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def kind(tensor: Tensor) -> MPI.Datatype:
    """The type by which its elements are moved."""
    return _MOVED[tensor.element_size()]
