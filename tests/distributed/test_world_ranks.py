"""Worlds of several processes: agreement, sections, time limits, and nothing left behind."""

from __future__ import annotations

import gc
import io
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shoal
from helpers.commands import wait_for
from helpers.ranks import Ranks, free_port
from helpers.scripts import Script
from helpers.small_training import sgd, squares
from shoal.distributed.seeds import random_state, set_random_state, start_generators
from shoal.distributed.watchdog import stacks
from shoal.distributed.watchdog.abort import EXIT_CODE
from shoal.util.errors import AgreementError, LaunchError

pytestmark = pytest.mark.processes

STEP_SECONDS = 6.0
PREPARE_SECONDS = 400.0
SHORT_SECONDS = 4.0


RANKS = 3


def collectives(world: shoal.World) -> Any:
    tensor = torch.tensor([1.0 + world.rank, -float(world.rank)])
    reduced = [world.all_reduce(tensor.clone(), op).tolist() for op in ("sum", "max", "min")]
    world.barrier()
    return (
        reduced,
        world.gather({"rank": world.rank}),
        [world.broadcast(f"from {world.rank}", source) for source in (0, 2)],
        world.agree([1, 2], "the list"),
    )


def test_collectives(ranks: Ranks) -> None:
    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    reduced = [[6.0, -3.0], [3.0, 0.0], [1.0, -2.0]]
    assert ranks.call(collectives) == [(reduced, everyone, ["from 0", "from 2"], [1, 2])] * 3


def extremes(world: shoal.World, op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of values of which each rank has one NaN and one infinity: what all have, and torch's own."""
    values = torch.randn(world.size, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    for rank in range(world.size):
        values[rank, rank] = torch.nan
        values[rank, 4 + rank] = (torch.inf, -torch.inf, torch.nan)[rank]
    own = torch.zeros(2, 9, dtype=dtype)[:1].t()  # not contiguous
    own.copy_(values[world.rank, :, None])
    expected = getattr(values, f"a{op}")(0)
    return world.all_reduce(own.requires_grad_(), op)[:, 0].detach(), expected


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_on_any_rank_is_nan_on_all(op: str, ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for found, expected in ranks.call(extremes, op, dtype):
            assert expected.isnan().sum() == 4
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def small_sums(world: shoal.World, dtype: torch.dtype) -> list[float]:
    """256 on one rank and 1 on the others, for each rank; a bfloat16 has no 257."""
    own = torch.tensor([256.0 if world.rank == rank else 1.0 for rank in range(world.size)])
    return world.all_reduce(own.to(dtype) * (8 if dtype == torch.float16 else 1)).tolist()


def test_sums_of_16_bits_are_rounded_once(ranks: Ranks) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        unit = 8 if dtype == torch.float16 else 1
        assert ranks.call(small_sums, dtype) == [[258.0 * unit] * RANKS] * RANKS


def disagree(world: shoal.World, odd: int) -> None:
    world.agree(8 if world.rank == odd else 7, "the width")


def test_the_odd_rank_is_named_on_all(ranks: Ranks) -> None:
    for odd in range(3):
        for error in ranks.errors(AgreementError, disagree, odd):
            assert f"8 on rank {odd}" in str(error)
            assert "the width" in error.fix


def streams(world: shoal.World, by_step: bool) -> tuple[float, float, float]:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(nn.Linear(1, 1), world)
    weights = float(torch.rand(()))
    batch = next(shoal.Loader((torch.ones(3, 1),), world, batch_size=3).epochs(1))
    if by_step:
        shoal.Step(model, sgd(model), shoal.Task(squares))(batch)
    else:
        next(iter(batch))
    return weights, float(torch.rand(())), float(torch.rand((), generator=world.generator("mine")))


@pytest.mark.parametrize("by_step", [False, True])
def test_weights_are_the_same_everywhere_and_noise_nowhere(ranks: Ranks, by_step: bool) -> None:
    weights, noise, mine = (set(values) for values in zip(*ranks.call(streams, by_step), strict=True))
    assert (len(weights), len(noise), len(mine)) == (1, 3, 3)


def start(world: shoal.World, seed: int) -> tuple[int, float, float, float]:
    """Seed each rank differently, as a script may, and return the seed of a new World and its draws."""
    kept = random_state()
    random.seed(seed + world.rank)
    np.random.seed(seed + world.rank)
    torch.manual_seed(seed + world.rank)
    root = start_generators(None, world.broadcast)
    found = root, random.random(), float(np.random.rand()), float(torch.rand(()))
    set_random_state(kept)
    return found


def test_all_ranks_begin_with_the_random_state_of_rank_0(ranks: Ranks) -> None:
    kept = random_state()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = 5, random.random(), float(np.random.rand()), float(torch.rand(()))
    set_random_state(kept)
    assert ranks.call(start, 5) == [expected] * RANKS


def section(world: shoal.World, directory: Path) -> tuple[bool, list[str]]:
    """Each rank notes when it runs the body; rank 0 alone is in it until it has left."""
    with world.rank_zero_first() as first:
        seen = sorted(path.name for path in directory.iterdir())
        if first:
            (directory / "begun").touch()
            (directory / "done").touch()
    return first, seen


def test_rank_0_runs_first_and_alone(ranks: Ranks, tmp_path: Path) -> None:
    after = ["begun", "done"]
    assert ranks.call(section, tmp_path) == [(True, []), (False, after), (False, after)]
    assert ranks.call(section, tmp_path) == [(True, after), (False, after), (False, after)]


def failing_section(world: shoal.World) -> None:
    with world.rank_zero_first() as first:
        if first:
            raise LookupError("no such archive")


def test_a_failure_of_rank_0_ends_the_wait_of_all(ranks: Ranks) -> None:
    own, *others = ranks.attempt(failing_section)
    assert "LookupError: no such archive" in own.text
    for other in others:
        assert isinstance(other.error, LaunchError)
        assert "rank 0 failed: LookupError: no such archive" in other.error.found
    assert ranks.call(collectives)[0][1] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


LAST_SECTION = """
import os, time, psutil, shoal
from pathlib import Path

note = Path("note")
with shoal.init() as world:
    if world.rank == 1:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        begun = time.monotonic()  # until rank 0 is gone, unless it waits
        while psutil.pid_exists(int(note.read_text())) and time.monotonic() - begun < 2:
            time.sleep(0.01)
    with world.rank_zero_first() as first:
        if first:
            note.write_text(str(os.getpid()))
"""


@pytest.mark.full
def test_rank_0_hosts_the_store_until_all_have_heard_of_its_last_section(
    start: Callable[..., Script],
) -> None:
    ended = start(LAST_SECTION, "hand").end()
    assert ended.out.count("ended with 0") == 2, ended.err


def mesh(world: shoal.World) -> tuple[Any, ...]:
    found = world.mesh
    assert world.mesh is found
    return found.mesh_dim_names, found.size(), found["replicate"].get_local_rank()


def test_the_mesh_has_the_axes_of_the_layout(ranks: Ranks) -> None:
    axes = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
    assert ranks.call(mesh) == [(axes, 3, rank) for rank in range(3)]


def local_rank_is_not_rank(world: shoal.World, port: int, directory: Path) -> tuple[Any, ...]:
    """What one GPU per task looks like: everyone believes to be local rank 0."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT=str(port))
    os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2")
    world.close()
    with shoal.init() as again, redirect_stdout(io.StringIO()) as said:
        with shoal.Run(directory, *one_step(again), trackers=()) as run:
            run.save()
        again.print("once")
        return again.placement.local_rank, again.is_rank_zero, "once" in said.getvalue()


def test_only_global_rank_0_is_first(tmp_path: Path) -> None:
    """FAILURES 26: two tasks that see one GPU each, both of local rank 0. One decides and prints."""
    with Ranks(2) as ranks:
        said = ranks.call(local_rank_is_not_rank, free_port(), tmp_path / "run")
    assert said == [(0, True, True), (0, False, False)]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-1"]


def live(port: int) -> None:
    """A whole life of a world: join, train a step, prepare something, leave."""
    os.environ["MASTER_PORT"] = str(port)
    with shoal.init() as world:
        one_step(world)
        with world.rank_zero_first() as first:
            assert first == world.is_rank_zero
        world.barrier()
    assert not dist.is_initialized()


def one_step(world: shoal.World, *, raw: bool = False) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(nn.Linear(2, 2), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    loader = shoal.Loader((torch.ones(8, 2),), world, batch_size=8)
    (batch,) = loader.epochs(1)
    step = shoal.Step(model, optimizer, task)
    if raw:
        for (values,) in batch:
            total = model(values).square().sum()
            batch.backward(total=total, count=len(values), model=model)
        batch.finish(model)
    else:
        step(batch)
    return step, loader


Resources = Counter[str]
"""Open connections, and all threads by their names, those of libraries too."""


def resources() -> Resources:
    found = Counter(connections=len(psutil.Process().net_connections()))
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            found[(thread / "comm").read_text().strip()] += 1
    return found


def settled(most: Resources) -> Resources:
    """What this process holds, once it is no more than `most`: libraries end threads when they like."""
    deadline = time.monotonic() + 60
    while not (found := resources()) <= most and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def live_again(world: shoal.World, ports: list[int]) -> tuple[Resources, Resources, Resources]:
    """What this process holds after a world without a model, after one with a model, and several."""
    world.close()
    own = Path("/proc/self/comm").read_text().strip()
    closed = settled(Counter({own: 1}))
    live(ports[0])
    gc.collect()  # a model and its engine know each other
    once = resources()
    for port in ports[1:]:
        live(port)
    gc.collect()
    return closed, once, settled(once)


def test_worlds_open_again_and_leave_nothing() -> None:
    with Ranks(2) as own:
        for closed, once, often in own.call(live_again, [free_port() for _ in range(4)]):
            assert closed.total() == 1  # the thread that says so
            # torch itself keeps the group of its last DistributedDataParallel, and no other.
            assert often <= once


def stay_away(world: shoal.World, directory: Path) -> None:
    (directory / f"stuck {world.rank}").touch()
    if world.rank == 0:
        world.barrier()
    threading.Event().wait()


def step_and_stay_away(world: shoal.World, directory: Path, raw: bool) -> None:
    """No Run: the first step alone starts the time limit of steps."""
    one_step(world, raw=raw)
    if raw:  # a section of rank 0 that takes longer than a step may
        with world.rank_zero_first() as first:
            threading.Event().wait(STEP_SECONDS + 1 if first else 0)
        world.barrier()
    stay_away(world, directory)


@pytest.mark.full
@pytest.mark.parametrize("raw", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_first_step_starts_the_time_limit_which_sections_do_not_have(
    tmp_path: Path, raw: bool
) -> None:
    """FAILURES 20: a long limit for what comes before the first step, a short one from then on.

    All ranks end with the code of a hang.
    """
    with Ranks(2, timeout=STEP_SECONDS, prepare_timeout=PREPARE_SECONDS) as ranks:
        outcome = threading.Thread(target=ranks.attempt, args=(step_and_stay_away, tmp_path, raw))
        outcome.start()
        wait_for(lambda: len(list(tmp_path.glob("stuck *"))) == ranks.size)
        for process in ranks.processes:
            process.join(PREPARE_SECONDS)
        seconds = time.time() - (tmp_path / "stuck 0").stat().st_mtime  # the rank that waits
        outcome.join()
        assert [process.exitcode for process in ranks.processes] == [EXIT_CODE] * ranks.size
        assert STEP_SECONDS * 0.9 < seconds < PREPARE_SECONDS


def wait_begun_during_check(world: shoal.World) -> None:
    """The main thread of rank 1 enters a barrier while its watch checks after a long computation."""
    world.watchdog.begin_step()
    world.barrier()
    checked = threading.Event()
    if world.rank == 0:
        time.sleep(SHORT_SECONDS + 1)  # rank 1 has to wait, but not for too long
    else:
        watch: Any = world.watchdog._watch
        original, before = watch._waits, watch._counts()

        def begun(lines: Any) -> Any:
            checked.set()
            wait_for(lambda: watch._counts() != before)
            return original(stacks.thread_stack(threading.main_thread()))

        watch._waits = begun
        assert checked.wait(100)
    world.barrier()


@pytest.mark.full
def test_a_wait_that_has_just_begun_is_no_hang() -> None:
    with Ranks(2, timeout=SHORT_SECONDS, prepare_timeout=PREPARE_SECONDS) as ranks:
        ranks.call(wait_begun_during_check)


ONE_AFTER_ANOTHER = """
import torch, shoal
for layout in ('shard=-1', 'pipeline=-1', 'replicate=-1'):
    with shoal.init(layout=layout) as world:
        world.mesh['shard'].get_group(), world.mesh['pipeline'].get_group()
        world.print(world.layout, int(world.all_reduce(torch.ones(()))))
"""


@pytest.mark.full
def test_one_world_after_another_in_the_same_processes(start: Callable[..., Script]) -> None:
    """The launcher's store outlives a world, with the addresses of its groups."""
    ended = start(ONE_AFTER_ANOTHER).end()
    assert ended.out.splitlines() == ["shard=2 2", "pipeline=2 2", "replicate=2 2"], ended.err


SET_BEFORE = """
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)
torch.set_default_device("cpu")

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

with shoal.init() as world:
    (device,) = [each.reason for each in world.decisions if each.what == "device"]
    assert device == "the script has called torch.set_default_device('cpu')", device
    inputs = torch.arange(12.0).view(6, 2) / 7
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.3)
    model = shoal.parallelize(model, world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    loader = shoal.Loader((inputs, inputs.sum(1, keepdim=True)), world, batch_size=6)
    for batch in loader.epochs(3):
        last = step(batch)
    assert model.weight.dtype == torch.get_default_dtype() == torch.float64
    world.print(f"{float(last.loss):.13f}")
"""


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 3))])
def test_the_default_dtype_and_device_are_those_of_all_ranks(
    size: int, start: Callable[..., Script]
) -> None:
    inputs = torch.arange(12.0, dtype=torch.float64).view(6, 2) / 7
    weight = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        loss = (inputs @ weight[:2] + weight[2] - inputs.sum(1)).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    ended = start(SET_BEFORE, size=size).end()
    assert ended.code == 0, ended.err
    assert float(ended.out) == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_simulated_process_group_is_not_adopted(size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        if size == 1:
            with shoal.init() as world:
                assert world.size == 1
        else:
            with pytest.raises(LaunchError, match="has no store through which") as raised:
                shoal.init()
            assert f"rank {size - 1} of {size}" in raised.value.given
            assert f"shoal run -n {size} script.py" in raised.value.fix
    finally:
        dist.destroy_process_group()
