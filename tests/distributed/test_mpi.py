"""backend="mpi" under Open MPI and MPICH: right in every call, and as exact as one process."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from helpers import mpirun
from helpers.reference import (
    CUT,
    PLAN,
    SEED,
    TOLERANCE,
    UNITS,
    Row,
    distance,
    specification,
    together,
    train,
)
from helpers.scripts import Script
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS

pytestmark = [pytest.mark.processes, pytest.mark.system]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128)

CALL = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parent)]}
import test_mpi
test_mpi.FUNCTION()
"""


@pytest.mark.parametrize("program", mpirun.PROGRAMS)
@pytest.mark.parametrize("function", ["call_all", "call_all_without_a_world"])
def test_every_call(function: str, program: str, tmp_path: Path, start: Callable[..., Script]) -> None:
    script = CALL.replace("FUNCTION", function)
    ended = start(script, mpirun.command(program, 3, tmp_path)).end()
    assert ended.code == 0, ended.err


def call_all() -> None:
    with shoal.init(backend="mpi", timeout=100, prepare_timeout=100) as world:
        rank, size = world.rank, world.size
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        for dtype, layout in itertools.product(DTYPES, (copied, transposed, strided)):
            reductions(rank, [values(each, dtype) for each in range(size)], layout)
            copies(rank, [values(each, dtype) for each in range(size)], layout)
        for check in CHECKS:
            check(rank, size)
        several_groups(rank, groups)
        for _ in range(CHECKED_STEPS + 1):
            world.watchdog.begin_step()
        unequal(rank, size)
        world.barrier()


def call_all_without_a_world() -> None:
    """As a plain script does, and again after the groups were destroyed."""
    import shoal.mpi  # noqa: F401

    for _ in range(2):
        dist.init_process_group("mpi")
        rank, size = dist.get_rank(), dist.get_world_size()
        names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
        assert str(rank) == next(os.environ[name] for name in names if name in os.environ)
        assert (size, dist.get_backend(), dist.is_mpi_available()) == (3, "mpi", True)
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        everyone = [values(each, torch.float32) for each in range(size)]
        reductions(rank, everyone, strided)
        copies(rank, everyone, copied)
        for check in CHECKS:
            check(rank, size)
        several_groups(rank, groups)
        unequal(rank, size)
        averaged_gradients(rank, None, list(range(size)))
        averaged_gradients(rank, dist.new_group([0, 2]), [0, 2])
        dist.destroy_process_group()


def averaged_gradients(rank: int, group: Any, members: list[int]) -> None:
    """DDP trains on all ranks, and on a part of them."""
    if rank in members:
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=group)
        model(torch.full((1, 1), float(rank))).sum().backward()
        weight, bias = (each.grad for each in model.parameters())
        same((weight, bias), (torch.full((1, 1), sum(members) / len(members)), torch.ones(1)))


def values(rank: int, dtype: torch.dtype, rows: int = 4) -> Tensor:
    """A tensor of a rank whose sums over few ranks every dtype holds exactly."""
    numbers = torch.arange(3 * rows).view(rows, 3) * (rank + 1) % 5
    if dtype.is_complex:
        return (numbers + 1j * rank).to(dtype)
    return (numbers > 1 if dtype is torch.bool else numbers).to(dtype)


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def reductions(rank: int, everyone: list[Tensor], layout: Callable[[Tensor], Tensor]) -> None:
    stacked, dtype = torch.stack(everyone), everyone[0].dtype
    wide = stacked.double() if dtype.is_floating_point else stacked
    wanted: dict[Any, Tensor] = {dist.ReduceOp.SUM: wide.sum(0).to(dtype)}
    if dtype is torch.bool:
        wanted = {dist.ReduceOp.SUM: stacked.any(0), dist.ReduceOp.PRODUCT: stacked.all(0)}
    if dtype.is_floating_point:
        summed = torch.float32 if dtype.itemsize == 2 else dtype
        wanted[dist.ReduceOp.AVG] = (wide.sum(0).to(summed) / len(everyone)).to(dtype)
    if not dtype.is_complex:
        wanted |= {dist.ReduceOp.MAX: stacked.amax(0), dist.ReduceOp.MIN: stacked.amin(0)}
    for op, result in wanted.items():
        tensor = layout(everyone[rank])
        dist.all_reduce(tensor, op)
        same(tensor, result)
        tensor.copy_(everyone[rank])
        dist.reduce(tensor, 1, op)
        same(tensor if rank == 1 else result, result)


def copies(rank: int, everyone: list[Tensor], layout: Callable[[Tensor], Tensor]) -> None:
    size, mine = len(everyone), layout(everyone[rank])
    outputs = [layout(torch.zeros_like(each)) for each in everyone]
    dist.all_gather(outputs, mine)
    same(outputs, everyone)
    whole = layout(torch.zeros_like(torch.cat(everyone)))
    dist.all_gather_into_tensor(whole, mine)
    same(whole, torch.cat(everyone))
    gathered = [torch.zeros_like(each) for each in everyone] if rank == 1 else None
    dist.gather(mine, gathered, dst=1)
    same(gathered or everyone, everyone)
    received = layout(torch.zeros_like(mine))
    works: list[Any] = [
        dist.isend(mine, (rank + 1) % size, tag=7),
        dist.irecv(received, (rank - 1) % size, tag=7),
    ]
    for work in works:
        work.wait()
    same(received, everyone[rank - 1])
    dist.scatter(mine, everyone[::-1] if rank == 0 else None)
    same(mine, everyone[::-1][rank])
    dist.broadcast(mine, size - 1)
    same(mine, everyone[0])


def refused(rank: int, size: int) -> None:
    cases: list[tuple[Tensor, Any]] = [
        (torch.ones(2), dist.ReduceOp.BXOR),
        (torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        (torch.ones(2).to_sparse(), dist.ReduceOp.SUM),
    ]
    for tensor, op in cases:
        with pytest.raises(shoal.ShoalError):
            dist.all_reduce(tensor, op)


def too_large(rank: int, size: int) -> None:
    """More elements than a C int counts, none of which is touched; MPI 4 takes them."""
    from mpi4py import MPI

    tensor = torch.empty(2**31 if MPI.Get_version() < (4, 0) else 0, dtype=torch.uint8)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_reduce(tensor),
        lambda: dist.send(tensor, (rank + 1) % size),
    ]
    for call in calls if tensor.numel() else []:
        with pytest.raises(shoal.ShoalError, match="passes at most 2,147,483,647"):
            call()


def too_long(rank: int, size: int) -> None:
    """A message that is longer than what shall hold it, to the last rank."""
    if rank == 0:
        dist.send(torch.ones(4), size - 1)
    if rank == size - 1:
        with pytest.raises(dist.DistBackendError, match=r"(?i)trunc"):
            dist.recv(torch.zeros(2), 0)


def in_place(rank: int, size: int) -> None:
    """Where output and input are one memory, as FSDP has them, or overlap in it."""
    everyone = torch.cat([values(each, torch.float32) for each in range(size)])
    for part in (rank, size - 1 - rank):
        whole = torch.zeros_like(everyone)
        mine = whole[4 * part :][:4].copy_(values(rank, torch.float32))
        dist.all_gather_into_tensor(whole, mine)
        same(whole, everyone)
    summed, rows = everyone.clone(), slice(4 * rank, 4 * rank + 4)
    dist.reduce_scatter_tensor(summed[rows], summed)
    same(summed[rows], everyone[rows] * size)


def scattered_sums(rank: int, size: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        everyone = [values(each, dtype, 2 * size) for each in range(size)]
        total = torch.stack(everyone).sum(0)[2 * rank : 2 * rank + 2]
        outputs = torch.zeros(2, 2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(outputs[0], everyone[rank].clone())
        dist.reduce_scatter(outputs[1], [each.clone() for each in everyone[rank].split(2)])
        same(outputs, torch.stack([total, total]))


def unequal(rank: int, size: int) -> None:
    """Shoal's check in the first steps refuses these; the first rank has nothing here."""
    output = torch.zeros(rank)
    dist.reduce_scatter(output, [torch.full((each,), float(each)) for each in range(size)])
    same(output, torch.full((rank,), float(rank * size)))
    outputs = [torch.zeros(each) for each in range(size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank)))
    same(outputs, [torch.full((each,), float(each)) for each in range(size)])


def exchanges(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
        everyone = [values(each, dtype, 2 * size) for each in range(size)]
        output = torch.zeros_like(everyone[0])
        dist.all_to_all_single(output, everyone[rank].clone())
        same(output, torch.cat([each[2 * rank : 2 * rank + 2] for each in everyone]))
    # Rank r sends r + s rows to rank s, and so nothing from rank 0 to itself.
    sent = [rank + to for to in range(size)]
    mine = torch.full((sum(sent), 2), float(rank))
    theirs = torch.cat([torch.full((of + rank, 2), float(of)) for of in range(size)])
    output = torch.zeros_like(theirs)
    dist.all_to_all_single(output, mine, sent, sent)
    same(output, theirs)
    outputs = [torch.zeros(of + rank, 2) for of in range(size)]
    dist.all_to_all(outputs, list(mine.split(sent)))
    same(torch.cat(outputs), theirs)


def empty(rank: int, size: int) -> None:
    nothing = torch.zeros(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather([torch.zeros(0, 3) for _ in range(size)], nothing)
    dist.all_gather_into_tensor(torch.zeros(0, 3), nothing)
    dist.reduce_scatter_tensor(torch.zeros(0, 3), nothing)
    dist.all_to_all_single(torch.zeros(0, 3), nothing, [0] * size, [0] * size)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    same(scalar, torch.tensor(float(sum(range(size)))))


def tags(rank: int, size: int) -> None:
    """Tags, and not the order of calls, say which is which; large ones are not buffered by MPI."""
    following, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((300_000,), float(rank)), torch.full((300_000,), -1.0 - rank)]
    works: list[Any] = [dist.isend(each, following, tag=tag) for tag, each in enumerate(sent)]
    received = torch.zeros(2, 300_000)
    for tag in (1, 0):
        dist.recv(received[tag], before, tag=tag)
    for work in works:
        work.wait()
    same(received[:, 0], torch.tensor([float(before), -1.0 - before]))
    if rank == 0:
        came = torch.zeros(1, dtype=torch.int64)
        sources = {dist.recv(came): int(came) for _ in range(size - 1)}
        assert sources == {each: each for each in range(1, size)}, sources
    else:
        dist.send(torch.tensor([rank]), 0)
    dist.barrier()


def objects(rank: int, size: int) -> None:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    assert everyone == [{"rank": each, "text": "x" * each * 1000} for each in range(size)]
    said = [("a", 1) if rank == 1 else None]
    dist.broadcast_object_list(said, src=1)
    assert said == [("a", 1)]


def many_under_way(rank: int, size: int) -> None:
    """Works wait in any order, know when they are over, and hand their results on as futures."""
    tensors = [torch.full((1000 * number + 1,), float(rank + number)) for number in range(20)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    total = sum(range(size))
    for number, tensor in enumerate(tensors):
        same(tensor, torch.full_like(tensor, total + size * number))
    same(doubled.wait(), tensors[3] * 2)


def several_groups(rank: int, groups: list[Any]) -> None:
    """Collectives of several groups are under way at once, in whatever order ranks wait for them."""
    works = []
    for members, group in zip(([0, 1], [1, 2]), groups, strict=True):
        if rank in members:
            tensor = torch.full((50_000,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(members)))
    everyone = torch.ones(3)
    dist.all_reduce(everyone)
    for work, tensor, total in reversed(works):
        work.wait()
        same(tensor[0].item(), float(total))
    same(everyone, torch.full((3,), 3.0))


CHECKS = (
    *(refused, too_large, too_long, in_place, scattered_sums, exchanges, empty, tags, objects),
    many_under_way,
)

TEXT = Row("transformer", 101, True, 2, True, 0.5)
IMAGES = Row("convolutional", 101, False, 1, False, 0.5)
WAYS: dict[int, list[tuple[str, Row, Any]]] = {
    2: [
        ("replicate=2", TEXT, shoal.DDP(bucket_cap_mb=0.001)),
        ("shard=2", dataclasses.replace(TEXT, raw=False), shoal.FSDP(modules=("block",))),
        (
            "tensor=2",
            Row("transformer", 96, False, 1, False, 0.5),
            shoal.TensorParallel(plan=PLAN),
        ),
        (
            "context=2",
            Row("transformer", 96, False, 1, False, None),
            shoal.ContextParallel(modules=("block",)),
        ),
        (
            "pipeline=2",
            dataclasses.replace(IMAGES, micro_batches=4),
            shoal.Pipeline(split_points=CUT["convolutional"], schedule="interleaved"),
        ),
    ],
    4: [
        ("replicate=2,shard=2", IMAGES, shoal.FSDP(modules=UNITS["convolutional"])),
        (
            "shard=2,tensor=2",
            dataclasses.replace(TEXT, micro_batches=1, raw=False),
            [shoal.TensorParallel(plan=PLAN), shoal.FSDP(modules=("block",))],
        ),
    ],
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "program", [mpirun.PROGRAMS[0], pytest.param(mpirun.PROGRAMS[1], marks=pytest.mark.long)]
)
def test_strategies_over_mpi_train_like_one_process(
    program: str, size: int, tmp_path: Path, start: Callable[..., Script]
) -> None:
    script = CALL.replace("FUNCTION()", f"train_all({size})")
    ended = start(script, mpirun.command(program, size, tmp_path)).end()
    assert ended.code == 0, ended.err


def train_all(size: int) -> None:
    torch.set_num_threads(1)
    for layout, row, strategy in WAYS[size]:
        with shoal.init(layout=layout, backend="mpi", seed=SEED, timeout=100) as world:
            ranks = together(world.gather(train(world, row, "", strategy, steps=5)))
            if world.is_rank_zero:
                one = specification(dataclasses.replace(row, micro_batches=1, raw=False), 5)
                assert all(distance(trained, one) < TOLERANCE for trained in ranks), layout
