"""All that torch asks of a process group, compared with what it means, on tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    """A tensor of a rank whose sums over few ranks every dtype holds exactly."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) * (rank + 1) % 5
    if dtype.is_complex:
        return (numbers + 1j * rank).to(dtype)
    return (numbers > 1 if dtype is torch.bool else numbers).to(dtype)


def check_all(backend: str) -> list[str]:
    """On each rank what did not come as it should; empty where all did."""
    wrong: list[str] = []
    with shoal.init(backend=backend, timeout=100, prepare_timeout=100) as world:
        ranks = list(range(world.size))
        halves = [dist.new_group(ranks[:2]), dist.new_group(ranks[-2:])]
        for name, check in CHECKS.items():
            problems = check(world.rank, world.size)
            wrong += [f"{name}: {problem}" for problem in problems]
        wrong += _groups_at_once(world.rank, ranks, halves)
        for _ in range(CHECKED_STEPS + 1):
            world.watchdog.begin_step()
        wrong += unequal(world.rank, world.size)
        world.barrier()
    return wrong


def _differ(what: object, found: Tensor, wanted: Tensor) -> list[str]:
    same = found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    return [] if same else [f"{what}: {found.tolist()} and not {wanted.tolist()}"]


def _layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The same values in memory of different order."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return {
        "contiguous": tensor.clone(),
        "transposed": tensor.t().contiguous().t(),
        "strided": wide[..., ::2],
    }


def reductions(rank: int, size: int) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        everyone = [values(each, dtype) for each in range(size)]
        stacked = torch.stack(everyone)
        wide = stacked.double() if dtype.is_floating_point else stacked
        wanted: dict[Any, Tensor] = {dist.ReduceOp.SUM: wide.sum(0).to(dtype)}
        if dtype is torch.bool:
            wanted = {dist.ReduceOp.SUM: stacked.any(0), dist.ReduceOp.PRODUCT: stacked.all(0)}
        if dtype.is_floating_point:
            wanted[dist.ReduceOp.AVG] = (wide.sum(0).to(_summed(dtype)) / size).to(dtype)
        if not dtype.is_complex:
            wanted[dist.ReduceOp.MAX] = stacked.amax(0)
            wanted[dist.ReduceOp.MIN] = stacked.amin(0)
        for op, result in wanted.items():
            for layout, tensor in _layouts(values(rank, dtype)).items():
                dist.all_reduce(tensor, op)
                wrong += _differ((dtype, op, layout), tensor, result)
                tensor.copy_(values(rank, dtype))
                dist.reduce(tensor, 1, op)
                if rank == 1:
                    wrong += _differ((dtype, op, layout, "reduce"), tensor, result)
    return wrong


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def refused(rank: int, size: int) -> list[str]:
    wrong = []
    cases: list[tuple[Tensor, Any]] = [
        (torch.ones(2), dist.ReduceOp.BXOR),
        (torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        (torch.ones(2).to_sparse(), dist.ReduceOp.SUM),
    ]
    for tensor, op in cases:
        try:
            dist.all_reduce(tensor, op)
        except shoal.ShoalError:
            continue
        wrong.append(f"{tensor}, {op}")
    return wrong


def too_large(rank: int, size: int) -> list[str]:
    """More elements than a C int counts, none of which is touched; MPI 4 takes them."""
    from mpi4py import MPI

    if MPI.Get_version() >= (4, 0):
        return []
    tensor = torch.empty(2**31, dtype=torch.uint8)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_reduce(tensor),
        lambda: dist.send(tensor, (rank + 1) % size),
    ]
    wrong = []
    for number, call in enumerate(calls):
        try:
            call()
        except shoal.ShoalError as error:
            if "passes at most 2,147,483,647" not in error.found:
                wrong.append(f"{number}: {error}")
            continue
        wrong.append(f"{number} was taken")
    return wrong


def too_long(rank: int, size: int) -> list[str]:
    """A message that is longer than what shall hold it, to the last rank."""
    wrong = []
    if rank == 0:
        dist.send(torch.ones(4), size - 1)
    if rank == size - 1:
        try:
            dist.recv(torch.zeros(2), 0)
            wrong.append("was received")
        except dist.DistBackendError as error:
            if "trunc" not in str(error).lower():
                wrong.append(str(error))
    return wrong


def copies(rank: int, size: int) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        everyone = [values(each, dtype) for each in range(size)]
        for layout, tensor in _layouts(values(rank, dtype)).items():
            outputs = [_layouts(torch.zeros_like(each))[layout] for each in everyone]
            dist.all_gather(outputs, tensor)
            for found, wanted in zip(outputs, everyone, strict=True):
                wrong += _differ((dtype, layout, "all_gather"), found, wanted)
            whole = _layouts(torch.zeros(4 * size, 3, dtype=dtype))[layout]
            dist.all_gather_into_tensor(whole, tensor)
            wrong += _differ((dtype, layout, "all_gather_into"), whole, torch.cat(everyone))
            gathered = [torch.zeros_like(each) for each in everyone] if rank == 1 else None
            dist.gather(tensor, gathered, dst=1)
            for found, wanted in zip(gathered or [], everyone, strict=False):
                wrong += _differ((dtype, layout, "gather"), found, wanted)
            dist.scatter(tensor, [each.clone() for each in everyone[::-1]] if rank == 0 else None)
            wrong += _differ((dtype, layout, "scatter"), tensor, everyone[::-1][rank])
            dist.broadcast(tensor, size - 1)
            wrong += _differ((dtype, layout, "broadcast"), tensor, everyone[::-1][size - 1])
    return wrong


def in_place(rank: int, size: int) -> list[str]:
    """Where output and input are one memory, as FSDP has them."""
    everyone = torch.cat([values(each, torch.float32) for each in range(size)])
    whole = torch.zeros_like(everyone)
    part = whole[4 * rank : 4 * rank + 4]
    part.copy_(values(rank, torch.float32))
    dist.all_gather_into_tensor(whole, part)
    wrong = _differ("gathered in place", whole, everyone)
    whole = torch.zeros_like(everyone)
    elsewhere = whole[4 * (size - 1 - rank) :][:4]
    elsewhere.copy_(values(rank, torch.float32))
    dist.all_gather_into_tensor(whole, elsewhere)
    wrong += _differ("gathered from elsewhere in the output", whole, everyone)
    summed = everyone * 1.0
    dist.reduce_scatter_tensor(summed[4 * rank : 4 * rank + 4], summed)
    mine = everyone[4 * rank : 4 * rank + 4] * size
    return wrong + _differ("scattered in place", summed[4 * rank : 4 * rank + 4], mine)


def scattered_sums(rank: int, size: int) -> list[str]:
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        everyone = [values(each, dtype, (2 * size, 3)) for each in range(size)]
        total = torch.stack(everyone).sum(0)
        output = torch.zeros(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(output, everyone[rank].clone())
        wrong += _differ((dtype, "one tensor"), output, total[2 * rank : 2 * rank + 2])
        output.zero_()
        dist.reduce_scatter(output, [each.clone() for each in everyone[rank].split(2)])
        wrong += _differ((dtype, "a list"), output, total[2 * rank : 2 * rank + 2])
    return wrong


def unequal(rank: int, size: int) -> list[str]:
    """Shoal's check in the first steps refuses these; the first rank has nothing here."""
    output = torch.zeros(rank)
    dist.reduce_scatter(output, [torch.full((each,), float(each)) for each in range(size)])
    wrong = _differ("reduced", output, torch.full((rank,), float(rank * size)))
    outputs = [torch.zeros(each) for each in range(size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank)))
    for each, found in enumerate(outputs):
        wrong += _differ("gathered", found, torch.full((each,), float(each)))
    return wrong


def exchanges(rank: int, size: int) -> list[str]:
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
        everyone = [values(each, dtype, (2 * size, 3)) for each in range(size)]
        rows = slice(2 * rank, 2 * rank + 2)
        output = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(output, everyone[rank].clone())
        wrong += _differ((dtype, "equal"), output, torch.cat([each[rows] for each in everyone]))
    # Rank r sends r + s rows to rank s, and so nothing from rank 0 to itself.
    sent = [rank + to for to in range(size)]
    mine = torch.full((sum(sent), 2), float(rank))
    theirs = torch.cat([torch.full((of + rank, 2), float(of)) for of in range(size)])
    output = torch.zeros_like(theirs)
    dist.all_to_all_single(output, mine, sent, sent)
    wrong += _differ("unequal rows", output, theirs)
    outputs = [torch.zeros(of + rank, 2) for of in range(size)]
    dist.all_to_all(outputs, list(mine.split(sent)))
    return wrong + _differ("unequal lists", torch.cat(outputs), theirs)


def empty(rank: int, size: int) -> list[str]:
    nothing = torch.zeros(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather([torch.zeros(0, 3) for _ in range(size)], nothing)
    dist.all_gather_into_tensor(torch.zeros(0, 3), nothing)
    dist.reduce_scatter_tensor(torch.zeros(0, 3), nothing)
    dist.all_to_all_single(torch.zeros(0, 3), nothing, [0] * size, [0] * size)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    return _differ("a scalar", scalar, torch.tensor(float(sum(range(size)))))


def messages(rank: int, size: int) -> list[str]:
    wrong = []
    following, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for layout, tensor in _layouts(values(rank, dtype)).items():
            found = _layouts(torch.zeros(4, 3, dtype=dtype))[layout]
            works: list[Any] = [dist.isend(tensor, following, tag=7), dist.irecv(found, before, tag=7)]
            for work in works:
                work.wait()
            wrong += _differ((dtype, layout), found, values(before, dtype))
    # Tags, and not the order of calls, say which is which; large ones are not buffered by MPI.
    first, second = torch.full((300_000,), float(rank)), torch.full((300_000,), -1.0 - rank)
    works = [dist.isend(first, following, tag=1), dist.isend(second, following, tag=2)]
    one, other = torch.zeros(300_000), torch.zeros(300_000)
    dist.recv(other, before, tag=2)
    dist.recv(one, before, tag=1)
    for work in works:
        work.wait()
    wrong += _differ("tag 1", one[:1], torch.tensor([float(before)]))
    wrong += _differ("tag 2", other[:1], torch.tensor([-1.0 - before]))
    if rank == 0:
        came = torch.zeros(1, dtype=torch.int64)
        sources = {dist.recv(came): int(came) for _ in range(size - 1)}
        if sources != {each: each for each in range(1, size)}:
            wrong.append(f"from any source: {sources}")
    else:
        dist.send(torch.tensor([rank]), 0)
    dist.barrier()
    return wrong


def objects(rank: int, size: int) -> list[str]:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    wanted = [{"rank": each, "text": "x" * each * 1000} for each in range(size)]
    said = [("a", 1) if rank == 1 else None]
    dist.broadcast_object_list(said, src=1)
    return [*(["gathered"] if everyone != wanted else []), *(["told"] if said != [("a", 1)] else [])]


def many_under_way(rank: int, size: int) -> list[str]:
    """Works wait in any order, know when they are over, and hand their results on as futures."""
    tensors = [torch.full((1000 * number + 1,), float(rank + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
    wrong = [] if all(work.is_completed() for work in works) else ["not all are over"]
    total = sum(range(size))
    for number, tensor in enumerate(tensors):
        wrong += _differ(number, tensor, torch.full_like(tensor, total + size * number))
    return wrong + _differ("by a future", doubled.wait(), tensors[3] * 2)


def _groups_at_once(rank: int, ranks: list[int], groups: list[Any]) -> list[str]:
    """Collectives of several groups are under way at once, in whatever order ranks wait for them."""
    wrong, works = [], []
    for members, group in zip((ranks[:2], ranks[-2:]), groups, strict=True):
        if rank in members:
            tensor = torch.full((50_000,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(members)))
    everyone = torch.ones(3)
    dist.all_reduce(everyone)
    for work, tensor, total in reversed(works):
        work.wait()
        wrong += _differ("groups", tensor[:1], torch.tensor([float(total)]))
    return wrong + _differ("world", everyone, torch.full((3,), float(len(ranks))))


CHECKS: dict[str, Callable[[int, int], list[str]]] = {
    check.__name__: check
    for check in (
        reductions,
        refused,
        too_large,
        too_long,
        copies,
        in_place,
        scattered_sums,
        exchanges,
        empty,
        messages,
        objects,
        many_under_way,
    )
}
