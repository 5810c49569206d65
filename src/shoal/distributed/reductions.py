"""All-reduce of a tensor, in which NaN is never lost."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.util.arguments import check_choice
from shoal.util.errors import AgreementError

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def check_operation(op: str) -> None:
    """Raise AgreementError for another operation than those of `OPERATIONS`."""
    check_choice(
        AgreementError,
        "world.all_reduce",
        "op",
        op,
        OPERATIONS,
        fix="use op='sum', and divide by world.size for a mean",
    )


_REDUCED = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)
"""The dtypes that all backends reduce."""


def check_dtype(tensor: torch.Tensor) -> None:
    """Raise AgreementError for a dtype that some backends do not reduce."""
    if tensor.dtype not in _REDUCED:
        dtype = str(tensor.dtype).removeprefix("torch.")
        wider = "float32" if tensor.is_floating_point() else "int64"
        raise AgreementError(
            given=f"world.all_reduce of a tensor of {dtype}",
            found=f"backends do not reduce {dtype}",
            fix=f"world.all_reduce(tensor.to(torch.{wider})); world.gather sends any dtype",
        )


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    """Reduce a tensor over the ranks of a group in place, in one collective.

    Sums of 16-bit numbers are added in float32 and rounded once. Backends round after each addition,
    so the result would depend on the order of the ranks, which with Gloo differs within a tensor. The
    maximum and the minimum are NaN where any rank has NaN. Backends compare, and all comparisons
    with NaN are false: Gloo loses one that is not on rank 0.
    """
    if op == "sum" and tensor.dtype in (torch.float16, torch.bfloat16):
        wide = tensor.detach().float()
        dist.all_reduce(wide, group=group)
        tensor.detach().copy_(wide)
        return
    if op == "sum" or not tensor.is_floating_point():
        dist.all_reduce(tensor, OPERATIONS[op], group=group)
        return
    values = tensor.detach()
    unknown = values.isnan()
    flags = unknown.to(values.dtype) * (1 if op == "max" else -1)
    both = torch.stack((values.masked_fill(unknown, 0), flags))
    dist.all_reduce(both, OPERATIONS[op], group=group)
    values.copy_(both[0].masked_fill(both[1] != 0, torch.nan))
