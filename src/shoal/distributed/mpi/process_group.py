"""The collectives, sends and receives of a process group over MPI.

Each is a non-blocking operation of MPI that starts on the caller's thread, so that all ranks start them
in the order of their scripts. MPI does not check sizes of buffers, so this module does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.distributed.mpi import buffers
from shoal.distributed.mpi.base_group import Finish, GroupMembers, Statuses
from shoal.distributed.mpi.work import Operation
from shoal.util.errors import ShoalError


class Group(GroupMembers):
    """The methods of torch's process groups. Some have two names, that of torch 2.11 and a newer."""

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Operation:
        """Reduce each tensor over all ranks, in place."""
        values = self._ready("all_reduce", _listed(tensors))
        op = getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM
        kinds = [buffers.operation(op, value.dtype) for value in values]
        wide = [buffers.reducible(value) for value in values]
        requests = [
            self._collectives.Iallreduce(MPI.IN_PLACE, buffers.reduced(one), kind)
            for one, (kind, _) in zip(wide, kinds, strict=True)
        ]
        return self._collective(
            "all_reduce",
            requests,
            of=values,
            result=values,
            buffers=wide,
            finish=self._giving(wide, values, kinds),
            opts=opts,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Reduce the tensor over all ranks into the root's."""
        values = self._ready("reduce", tensors)
        (value,) = values
        kind, mean = buffers.operation(opts.reduceOp, value.dtype)
        wide, root = buffers.reducible(value), opts.rootRank
        spec = buffers.reduced(wide)
        sent: Any = MPI.IN_PLACE if self._rank == root else spec
        received = spec if self._rank == root else None
        request = self._collectives.Ireduce(sent, received, kind, root)
        return self._collective(
            "reduce",
            [request],
            of=values,
            result=values,
            buffers=[wide],
            finish=self._giving([wide], values, [(kind, mean)]) if self._rank == root else None,
            opts=opts,
        )

    def _giving(
        self,
        flat: Sequence[Tensor],
        to: Sequence[Tensor | Sequence[Tensor]],
        kinds: Sequence[tuple[MPI.Op, bool]] = (),
    ) -> Finish:
        """Return the action that copies the buffers to the user's tensors, or cuts them into lists.

        `kinds` are the operations of a reduction; a mean is a sum that is divided here.
        """

        def finish(_: Statuses) -> None:
            for one, (_kind, mean) in zip(flat, kinds, strict=False):
                if mean:
                    buffers.divide(one, self._size)
            for one, tensors in zip(flat, to, strict=True):
                _cut(one, [tensors] if isinstance(tensors, Tensor) else tensors)

        return finish

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Operation:
        """Copy each tensor of the root to all ranks."""
        values = self._ready("broadcast", _listed(tensors))
        root = getattr(opts, "rootRank", opts) or 0
        flat = [buffers.flat(value) for value in values]
        requests = [self._collectives.Ibcast(buffers.moved(one), root) for one in flat]
        return self._collective(
            "broadcast",
            requests,
            of=values,
            result=values,
            buffers=flat,
            finish=self._giving(flat, values),
            opts=opts,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        """Concatenate the inputs of all ranks into `output`."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        """Do the same for several tensors."""
        values = self._ready("all_gather", inputs)
        filled = [buffers.checked(output) for output in outputs]
        flat = [buffers.flat(output) for output in filled]
        sources, requests = [], []
        for value, output in zip(values, flat, strict=True):
            _check_sizes("all_gather", value, output, value.numel() * self._size, output.numel())
            source, count = buffers.flat(value), value.numel()
            spec: Any = MPI.IN_PLACE  # FSDP gathers in place
            if source.data_ptr() != output.data_ptr() + self._rank * source.nbytes:
                source = source.clone() if buffers.overlap(source, output) else source
                spec = buffers.moved(source)
            sources.append(source)
            requests.append(self._collectives.Iallgather(spec, buffers.moved(output, count)))
        return self._collective(
            "all_gather",
            requests,
            of=values,
            result=filled,
            buffers=[*sources, *flat],
            finish=self._giving(flat, filled),
            opts=opts,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        """Gather the inputs of all ranks, which may differ in size, into the tensors of a list."""
        values = self._ready("all_gather", inputs)
        filled = [[buffers.checked(each) for each in output] for output in outputs]
        sources = [buffers.flat(value) for value in values]
        joined, requests = [], []
        for source, output in zip(sources, filled, strict=True):
            counts = self._counts("all_gather", output)
            _check_sizes("all_gather", source, output[self._rank], source.numel(), counts[self._rank])
            joined.append(torch.empty(sum(counts), dtype=source.dtype))
            spec = buffers.parts(joined[-1], counts)
            requests.append(self._collectives.Iallgatherv(buffers.moved(source), spec))
        return self._collective(
            "all_gather",
            requests,
            of=values,
            result=[each for output in filled for each in output],
            buffers=[*sources, *joined],
            finish=self._giving(joined, filled),
            opts=opts,
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        """Do the same, with the outputs in lists by rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Operation:
        """Gather the inputs of all ranks into the tensors of the root's list."""
        values = self._ready("gather", inputs)
        source, filled, joined = buffers.flat(values[0]), [], []
        spec = None
        if self._rank == opts.rootRank:
            filled = [buffers.checked(each) for each in outputs[0]]
            counts = self._counts("gather", filled)
            _check_sizes("gather", source, filled[self._rank], source.numel(), counts[self._rank])
            joined = [torch.empty(sum(counts), dtype=source.dtype)]
            spec = buffers.parts(joined[0], counts)
        request = self._collectives.Igatherv(buffers.moved(source), spec, opts.rootRank)
        return self._collective(
            "gather",
            [request],
            of=values,
            result=filled,
            buffers=[source, *joined],
            finish=self._giving(joined, [filled] * len(joined)),
            opts=opts,
        )

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Operation:
        """Copy the tensor for this rank from the root's list."""
        values = self._ready("scatter", outputs)
        (value,) = values
        flat, joined, spec = buffers.flat(value), [], None
        if self._rank == opts.rootRank:
            given = [buffers.checked(each) for each in inputs[0]]
            counts = self._counts("scatter", given)
            _check_sizes("scatter", given[self._rank], value, counts[self._rank], value.numel())
            joined = [_joined(given, value.dtype)]
            spec = buffers.parts(joined[0], counts)
        request = self._collectives.Iscatterv(spec, buffers.moved(flat), opts.rootRank)
        return self._collective(
            "scatter",
            [request],
            of=values,
            result=values,
            buffers=[flat, *joined],
            finish=self._giving([flat], values),
            opts=opts,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Operation:
        """Reduce the inputs of all ranks and keep this rank's part in `output`."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Operation:
        """Do the same for several tensors."""
        counts = [[output.numel()] * self._size for output in outputs]
        return self._reduce_scatter(outputs, inputs, counts, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Operation:
        """Do the same, with the parts in lists; they may differ in size."""
        counts = [self._counts("reduce_scatter", each) for each in inputs]
        joined = [
            _joined([buffers.checked(part) for part in each], output.dtype)
            for each, output in zip(inputs, outputs, strict=True)
        ]
        return self._reduce_scatter(outputs, joined, counts, opts)

    def _reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        counts: Sequence[Sequence[int]],
        opts: Any,
    ) -> Operation:
        values = self._ready("reduce_scatter", outputs)
        kinds = [buffers.operation(opts.reduceOp, value.dtype) for value in values]
        sources, wide, requests = [], [], []
        for value, given, (kind, _), of in zip(values, inputs, kinds, counts, strict=True):
            _check_sizes("reduce_scatter", given, value, given.numel(), sum(of))
            _check_sizes("reduce_scatter", given, value, of[self._rank], value.numel())
            source, part = buffers.reducible(buffers.checked(given)), buffers.reducible(value)
            source = source.clone() if buffers.overlap(source, part) else source
            sources.append(source)
            wide.append(part)
            request = self._collectives.Ireduce_scatter(
                buffers.reduced(source), buffers.reduced(part), list(of), kind
            )
            requests.append(request)
        return self._collective(
            "reduce_scatter",
            requests,
            of=values,
            result=values,
            buffers=[*sources, *wide],
            finish=self._giving(wide, values, kinds),
            opts=opts,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Operation:
        """Send rows of `input` to all ranks and receive those of `output`; splits are their numbers."""
        (value,) = self._ready("all_to_all", [input], sized=False)
        filled = buffers.checked(output)
        source, flat = buffers.flat(value), buffers.flat(filled)
        source = source.clone() if buffers.overlap(source, flat) else source
        sent, received = self._rows(source, input_splits), self._rows(flat, output_splits)
        _check_sizes("all_to_all", source, flat, sent[self._rank], received[self._rank])
        request = self._collectives.Ialltoallv(
            buffers.parts(source, sent), buffers.parts(flat, received)
        )
        return self._collective(
            "all_to_all",
            [request],
            of=[value],
            result=[filled],
            buffers=[source, flat],
            finish=self._giving([flat], [filled]),
            opts=opts,
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        """Send each tensor of `inputs` to a rank, and receive each of `outputs` from one."""
        values = self._ready("all_to_all", inputs, sized=False)
        filled = [buffers.checked(output) for output in outputs]
        sent, received = self._counts("all_to_all", values), self._counts("all_to_all", filled)
        _check_sizes("all_to_all", values[0], filled[0], sent[self._rank], received[self._rank])
        source = _joined(values, values[0].dtype)
        joined = torch.empty(sum(received), dtype=source.dtype)
        request = self._collectives.Ialltoallv(
            buffers.parts(source, sent), buffers.parts(joined, received)
        )
        return self._collective(
            "all_to_all",
            [request],
            of=values,
            result=filled,
            buffers=[source, joined],
            finish=self._giving([joined], [filled]),
            opts=opts,
        )

    def barrier(self, opts: Any = None) -> Operation:
        """Wait until all ranks have called it."""
        self._ready("barrier", [])
        request = self._collectives.Ibarrier()
        return self._collective("barrier", [request], of=[], result=[], buffers=[], opts=opts)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Operation:
        """Send a tensor to a rank of the group."""
        value = buffers.checked(tensors[0])
        flat = buffers.flat(value)
        request = self._messages.Isend(buffers.moved(flat), to, tag)
        return self._message("send", request, value, flat, None)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Operation:
        """Receive a tensor from a rank of the group."""
        value = buffers.checked(tensors[0])
        flat = buffers.flat(value)
        request = self._messages.Irecv(buffers.moved(flat), source, tag)

        def finish(statuses: Statuses) -> None:
            _check_sizes("recv", value, flat, statuses[0].Get_count(buffers.kind(flat)), flat.numel())
            _cut(flat, [value])

        return self._message("recv", request, value, flat, finish)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Operation:
        """Receive a tensor from any rank."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _counts(self, operation: str, tensors: Sequence[Tensor]) -> list[int]:
        """Return the number of elements of each tensor in a list with one per rank."""
        if len(tensors) != self._size or len({tensor.dtype for tensor in tensors}) > 1:
            raise _mismatch(
                operation, f"{len(tensors)} tensors", f"{self._size} of one dtype are needed"
            )
        return [tensor.numel() for tensor in tensors]

    def _rows(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return the number of elements of a tensor to or from each rank."""
        rows = len(tensor)
        each = list(splits) or [rows // self._size] * self._size
        if len(each) != self._size or sum(each) != rows:
            raise _mismatch(
                "all_to_all", f"{rows} rows in parts of {each}", f"{self._size} parts are needed"
            )
        return [count * math.prod(tensor.shape[1:]) for count in each]


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)


def _cut(whole: Tensor, into: Sequence[Tensor]) -> None:
    """Copy a contiguous tensor into several, unless it is the only one of them."""
    if len(into) != 1 or whole is not into[0]:
        parts = whole.reshape(-1).split([each.numel() for each in into])
        for part, tensor in zip(parts, into, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _check_sizes(operation: str, one: Tensor, other: Tensor, sent: int, received: int) -> None:
    """Raise ShoalError if the data sent does not fill the buffer that receives it."""
    if one.dtype != other.dtype or sent != received:
        raise _mismatch(
            operation, f"{sent} of {one.dtype} sent", f"{received} of {other.dtype} received"
        )


def _mismatch(operation: str, given: str, found: str) -> ShoalError:
    return ShoalError(
        given=f"{operation} over MPI: {given}",
        found=found,
        fix="let the tensors that are sent and received have the same size and dtype",
    )
