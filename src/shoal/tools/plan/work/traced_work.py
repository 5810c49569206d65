"""The work of a step, by the operations that a trace runs: FLOPs, bytes and their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal._torch.autograd import storage_key
from shoal._torch.c10d import operator_group
from shoal._torch.dispatch import UncompiledMode, is_wrapper, overloads_of, schema_of, tree_iter
from shoal.telemetry.collective_stats import operation_name
from shoal.telemetry.usage.flops import flop_formula
from shoal.tools.plan.work.planned_step import RankGroup, StepCollective, Work, WorkSegment

_COLLECTIVES = ("c10d", "_c10d_functional")
_ATTRIBUTES = "prim"
"""The namespace of operators that read no elements, such as the device of a tensor."""


class TracedWork(UncompiledMode):
    """Dispatch mode that adds up the work of the operations inside, and records collectives.

    A convolution counts as the matrix product into which it is rewritten (implicit GEMM), with its
    FLOPs by torch's formulas. An operation without a formula reads its arguments and writes its
    results. A Fourier transform does so once per dimension. Views are not counted.
    """

    def __init__(self, moment: Callable[[], str]) -> None:
        super().__init__()
        self._moment = moment
        self._now = ""
        self._work = Work()
        self._segments: list[WorkSegment] = []
        self._messages: Counter[tuple[str, int]] = Counter()
        self._unread: dict[int, StepCollective] = {}
        """Messages that no operation has read, by the storage of their tensor."""

    @property
    def segments(self) -> tuple[WorkSegment, ...]:
        """All work so far, in its order."""
        rest = [WorkSegment(moment=self._now, work=self._work)] if self._work != Work() else []
        return (*self._segments, *rest)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation and add its work."""
        if any(map(is_wrapper, types)):
            return NotImplemented
        named = named or {}
        if self._unread and function.namespace not in _COLLECTIVES:
            self._read_messages((arguments, named))
        result = function(*arguments, **named)
        if (moment := self._moment()) != self._now:
            self._end_segment(None)
            self._now = moment
        if function.namespace in _COLLECTIVES:
            collective = _collective_of(function, arguments, named, result)
            if collective is not None:
                self._add_collective(collective, (arguments, named))
        elif is_counted(function):
            self._work += operation_work(function, arguments, named, result)
        return result

    def _add_collective(self, collective: StepCollective, given: Any) -> None:
        if collective.peer >= 0:
            key = collective.operation, collective.peer
            collective = replace(collective, message=self._messages[key])
            self._messages[key] += 1
        if collective.operation == "recv":
            self._unread |= dict.fromkeys(_storages(given), collective)
        else:
            self._end_segment(collective)

    def _read_messages(self, given: Any) -> None:
        for storage in _storages(given):
            if storage in self._unread:
                self._end_segment(self._unread.pop(storage))

    def _end_segment(self, collective: StepCollective | None) -> None:
        if collective is not None or self._work != Work():
            self._segments.append(WorkSegment(moment=self._now, work=self._work, collective=collective))
        self._work = Work()


def _collective_of(function: Any, arguments: Any, named: Any, result: Any) -> StepCollective | None:
    given = _bound(function, arguments, named)
    group = operator_group(list(given.values()))
    if group is None:  # such as wait_tensor
        return None
    wait = "update" if given.get("async_op", True) else "stream"
    if function.namespace == "_c10d_functional":
        wait = "module"
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return StepCollective(
        operation=operation_name(schema_of(function).name.rpartition("::")[2]),
        count=max(map(_bytes_in, (*given.values(), result))),
        group=RankGroup(len(ranks), stride),
        wait=wait,
        peer=given.get("dst", given.get("src", -1)),
    )


def _bound(function: Any, arguments: Any, named: Any) -> dict[str, Any]:
    """Return all arguments of an operator by name, with the defaults of those that are not given."""
    schema = schema_of(function)
    given: dict[str, Any] = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    given |= dict(zip((each.name for each in schema.arguments), arguments, strict=False)) | named
    return given


def is_counted(function: Any) -> bool:
    """Return whether an operator computes: it reads elements, and is not a view or a collective."""
    return not function.is_view and function.namespace not in (*_COLLECTIVES, _ATTRIBUTES)


def operation_work(function: Any, arguments: Any, named: Any, result: Any) -> Work:
    """Return the work of one operator with these arguments and this result."""
    written = result
    if result is None:  # such as of lists of tensors, in place
        aliases = zip(schema_of(function).arguments, arguments, strict=False)
        written = [each for own, each in aliases if own.alias_info and own.alias_info.is_write]
    moved = float(_bytes_in((arguments, named)) + _bytes_in(written))
    formula = flop_formula(function)
    name = str(overloads_of(function)).rpartition(".")[2]
    if formula is None:
        passes = len(arguments[1]) if name.startswith("_fft_") else 1
        return Work(traffic=passes * moved, operations=1)
    flops = float(formula(*arguments, **named, out_val=result))
    if "attention" in name:
        causal = _bound(function, arguments, named).get("is_causal", False)
        # Fused kernels skip the blocks above the diagonal.
        return Work(attention=flops / 2 if causal else flops, traffic=moved, operations=1)
    if "convolution" in name:
        return Work(convolutions=flops, product_bytes=moved, operations=1)
    return Work(products=flops, product_bytes=moved, operations=1)


def _storages(values: Any) -> list[int]:
    """Return an identifier of the storage of each tensor."""
    tensors = (each for each in tree_iter(values) if isinstance(each, Tensor))
    return [storage_key(each) for each in tensors if each.layout is torch.strided]


def _bytes_in(values: Any) -> int:
    """Return the bytes of the elements of all tensors; those of an expanded one count once."""
    total = 0
    for each in tree_iter(values):
        if isinstance(each, Tensor):
            if each.layout is torch.strided:
                sizes = zip(each.shape, each.stride(), strict=True)
                total += each.element_size() * math.prod(size for size, stride in sizes if stride)
            else:
                total += each.element_size() * each._nnz()
    return total
