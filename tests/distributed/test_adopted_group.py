"""`shoal.init` where a default process group exists: it is adopted, and outlives the World."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

import shoal
from helpers.ranks import PRELOADED
from helpers.scripts import AGREEING, Script, trained, trained_alone
from helpers.small_training import sgd, squared_error
from shoal._torch import c10d
from shoal.distributed.adopted_group import AdoptedGroup
from shoal.distributed.device import backends, choose_device
from shoal.distributed.env_vars import placement

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SECONDS = 120.0
OWN_LIMIT = timedelta(seconds=7)


def _serve(
    pipe: Connection, store: Path, rank: int, size: int, function: Callable[..., Any], arguments: Any
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=OWN_LIMIT
    )
    pipe.send(function(*arguments))
    dist.destroy_process_group()


@pytest.fixture
def spawned(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function in N processes that have made a group of their own, without a launcher."""

    def call(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, store, rank, size, function, arguments)
            processes.append(context.Process(target=_serve, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            results: list[Any] = []
            for pipe, process in zip(pipes, processes, strict=True):
                assert pipe.poll(SECONDS)
                try:
                    results.append(pipe.recv())
                except EOFError:
                    process.join(SECONDS)
                    results.append(process.exitcode)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()

    return call


def is_whole() -> bool:
    """Whether the default group works, is the only one, and has its own limit again."""
    total = torch.ones(1)
    dist.all_reduce(total)
    (group,) = c10d.process_groups()
    return total.item() == dist.get_world_size() and c10d.timeout_of(group) == OWN_LIMIT


def train(world: shoal.World, folder: str, epochs: int, parallel: Any) -> list[float]:
    """Train in float64 in a Run, which continues what an earlier one has saved."""
    inputs = torch.randn(50, 3, dtype=torch.float64)
    data = (inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = shoal.parallelize(model, world, parallel)
    step = shoal.Step(model, sgd(model, momentum=0.9), shoal.Task(squared_error), clip=1.0)
    loader = shoal.Loader(data, world, batch_size=8)
    with shoal.Run(folder, step, loader) as run:
        run.restore()
        for batch in loader.epochs(epochs):
            step(batch)
            run.tick(every=3)
        run.save()
    parts = model.state_dict().values()
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat([part.flatten() for part in whole]).tolist()


def train_twice(folder: str, parallel: Any) -> tuple[list[float], bool]:
    """Train in two worlds on one group, the second of which resumes what the first has saved."""
    for epochs in (1, 2):
        with shoal.init(
            device="cpu", seed=3, layout="shard=-1" if parallel else "replicate=-1"
        ) as world:
            if world.size > 1:
                assert [each.what for each in world.decisions].count("backend") == 1
                limits = [c10d.timeout_of(group) for group in c10d.process_groups()]
                assert all(limit and limit > OWN_LIMIT for limit in limits)
            with world.rank_zero_first() as first:
                assert first == (world.rank == 0)
            parameters = train(world, folder, epochs, parallel)
    return parameters, not dist.is_initialized() or is_whole()


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, None),
        (1, None),
        pytest.param(3, None, marks=pytest.mark.full),
        pytest.param(2, shoal.FSDP(), marks=pytest.mark.full),
    ],
)
def test_trains_as_one_process_and_leaves_the_group(
    size: int, parallel: Any, spawned: Callable[..., list[Any]], tmp_path: Path
) -> None:
    expected, _ = train_twice(str(tmp_path / "alone"), None)
    for parameters, whole in spawned(size, train_twice, str(tmp_path / "run"), parallel):
        assert parameters == pytest.approx(expected, rel=0, abs=1e-12)
        assert whole


def facts() -> tuple[Any, ...]:
    with shoal.init(device="cpu") as world:
        made = {each.what: each for each in world.decisions}
        place = world.placement
        return (
            (place.rank, place.size, place.local_rank, place.local_size, place.node, place.nodes),
            place.launcher,
            place.warning,
            made["time limits"].reason,
            made["backend"].reason,
        )


def under(variables: dict[str, str], function: Callable[..., Any]) -> Any:
    os.environ.update(variables)
    return function()


def test_placement_and_limits_are_stated(spawned: Callable[..., list[Any]]) -> None:
    found = spawned(2, under, {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, facts)
    for rank, (place, launcher, warning, limits, backend) in enumerate(found):
        assert place == (rank, 2, rank, 2, 0, 1)
        assert launcher == "init_process_group"
        assert not warning  # the variables lack the address
        assert limits.endswith(
            "the process group that exists gets its own limit of 7 s back at close()"
        )
        assert backend == "the process group that exists has cpu:gloo,cuda:gloo"


def test_variables_that_contradict_the_group_are_stated(spawned: Callable[..., list[Any]]) -> None:
    complete = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for rank, (place, launcher, warning, *_) in enumerate(spawned(2, under, complete, facts)):
        assert place[:2] == (rank, 2)
        assert launcher == "init_process_group"
        assert warning == f"rank 1 of 4 by env:// is rank {rank} of 2 of the process group that exists"


def refusal(options: dict[str, Any], twice: bool) -> tuple[str, bool]:
    try:
        with shoal.init(device="cpu"):
            if twice:
                shoal.init(device="cpu", **options)
        shoal.init(**{"device": "cpu", **options})
    except shoal.ShoalError as error:
        return str(error), is_whole()
    return "", False


@pytest.mark.parametrize(
    ("options", "twice", "said"),
    [
        ({"layout": "shard=3"}, False, ["shard=3", "2"]),
        ({}, True, ["shoal.init() on rank ", "an earlier World of this process is still open"]),
        (
            {"backend": "nccl"},
            False,
            ["backend='nccl'", "cpu:gloo,cuda:gloo", "TorchConfig(backend=…)"],
        ),
        ({"device": "meta"}, False, ["device='meta'", "cpu:gloo,cuda:gloo"]),
    ],
)
def test_refused(
    options: dict[str, Any], twice: bool, said: list[str], spawned: Callable[..., list[Any]]
) -> None:
    for text, whole in spawned(2, refusal, options, twice):
        assert all(each in text for each in ["given: ", "found: ", "fix: ", *said]), text
        assert whole


@pytest.mark.parametrize(
    ("config", "made"),
    [
        ("cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "gloo"),
    ],
)
def test_the_second_group_serves_the_host_too(config: str, made: str) -> None:
    existing = AdoptedGroup(rank=0, size=2, config=config, assigned=None, kept={}, store=HashStore())
    device = torch.device("cuda", 0)
    assert backends(existing.choose_backend(None, device).value, device) == made


def test_an_assigned_device_is_taken_and_said() -> None:
    assigned = (torch.device("cpu"), "ACCELERATE_TORCH_DEVICE=cpu")
    chosen = choose_device(None, placement({}), assigned=assigned)
    assert (chosen.value.type, chosen.reason) == ("cpu", "assigned by ACCELERATE_TORCH_DEVICE=cpu")


def fail_on_one() -> tuple[str, bool]:
    try:
        with shoal.init(device="cpu") as world:
            if world.rank == 1:
                raise ValueError("on purpose")
            world.barrier()
    except (ValueError, shoal.LaunchError) as error:
        return str(error), is_whole()
    return "", False


def test_a_failed_rank_is_named_and_the_group_is_left(spawned: Callable[..., list[Any]]) -> None:
    (waited, whole), (failed, also) = spawned(2, fail_on_one)
    assert "rank 1" in waited
    assert failed == "on purpose"
    assert whole
    assert also


def init_on_one() -> tuple[str, bool]:
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(shoal.LaunchError) as caught:
            shoal.init(device="cpu", prepare_timeout=0.5)
        text = str(caught.value)
    return text, is_whole()


def test_a_rank_that_does_not_call_init_is_named(spawned: Callable[..., list[Any]]) -> None:
    (text, whole), (_, also) = spawned(2, init_on_one)
    assert "rank 1 did not join" in text
    assert "calls shoal.init" in text
    assert whole
    assert also


def hang_in_a_thread() -> None:
    """Train as Ray does, not in Python's main thread: one rank does not join a barrier."""

    def run() -> None:
        with shoal.init(device="cpu", prepare_timeout=1.0) as world:
            if world.rank == 0:
                world.barrier()
            threading.Event().wait()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_hang_outside_of_the_main_thread_ends_all_ranks(spawned: Callable[..., list[Any]]) -> None:
    assert spawned(2, hang_in_a_thread) == [124, 124]


@pytest.mark.full
def test_a_restart_of_a_script_with_its_own_group_resumes(
    start: Callable[..., Script], tmp_path: Path
) -> None:
    """The launcher and its attempts are those of the variables, which agree with the group."""
    (tmp_path / "alone").mkdir()
    expected = trained_alone(tmp_path / "alone")
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    dies = "if (world.rank, step.number, first) == (1, 7, True): os._exit(3)"
    text = AGREEING.replace("step(batch)\n", f"step(batch)\n                {dies}\n")
    command = [sys.executable, "-m", "shoal", "run", "--restarts", "1", "-n", "2"]
    ended = start(group + text.replace("tick()", "tick(every=2)"), command, "2", "0", "run").end()
    assert ended.code == 0, ended.err
    assert "launched by shoal run" in ended.err
    assert "attempt 1 with" in ended.out
    assert trained(ended.out) == [expected]
