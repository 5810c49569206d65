"""backend="mpi" under Open MPI and MPICH: how runs are stopped, fail, hang, and are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import mpirun
from helpers.scripts import Script
from shoal.distributed.cluster_env import REQUEUE

pytestmark = [pytest.mark.processes, pytest.mark.system]

TRAIN = """
import hashlib, os, signal, sys
import torch, shoal
from torch import nn

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

def train(directory, stops):
    torch.manual_seed(0)
    inputs = torch.randn(41, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    model = shoal.parallelize(model, world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(loss), clip=1.0)
    data = shoal.Loader((inputs, inputs.sum(1, keepdim=True)), world, batch_size=12)
    with shoal.Run(directory, step, data) as run:
        run.restore()
        for batch in data.epochs(5):
            step(batch)
            if stops and step.number == 7 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run.tick(every=3)
    values = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    world.print("digest", hashlib.sha256(values.numpy().tobytes()).hexdigest())

with shoal.init(backend="mpi", seed=1) as world:
    for directory in sys.argv[1:]:
        train(directory, directory == "stopped")
"""

FAIL = """
import os, sys, shoal

with shoal.init(backend="mpi") as world:
    world.barrier()
    if world.rank == 1:
        HOW
    world.barrier()
"""

HANG = """
import threading
import torch, torch.distributed as dist, shoal

with shoal.init(backend="mpi", timeout=6, prepare_timeout=100) as world:
    try:
        world.all_reduce(torch.ones(2 + world.rank))
    except shoal.AgreementError as error:
        world.print(f"refused: {error.found}")
    for _ in range(5):
        world.watchdog.begin_step()
        world.barrier()
    if world.rank == 1:
        threading.Event().wait()  # never
    WAIT
"""

OPEN_MPI, MPICH = mpirun.PROGRAMS
Start = Callable[..., Script]


@pytest.mark.long
@pytest.mark.parametrize("program", mpirun.PROGRAMS)
def test_stopped_and_resumed_it_ends_bit_equal(program: str, tmp_path: Path, start: Start) -> None:
    """A signal to one rank; saves go on beside the training, over a group of their own."""
    ranks = mpirun.command(program, 2, tmp_path)
    stopped = start(TRAIN, ranks, "whole", "stopped").end()
    assert stopped.code == REQUEUE, stopped.err
    saved = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-8"
    resumed = start(TRAIN, ranks, "stopped").end()
    assert resumed.code == 0, resumed.err
    assert re.findall(r"digest \w+", resumed.out) == re.findall(r"digest \w+", stopped.out) != []


@pytest.mark.parametrize(
    ("program", "how", "code", "said"),
    [
        (OPEN_MPI, "raise ValueError('broken')", None, "ValueError: broken"),
        (OPEN_MPI, "sys.exit(3)", 3, ""),
        pytest.param(
            *(OPEN_MPI, "os.kill(os.getpid(), 9)", None, "exited on signal 9"), marks=pytest.mark.long
        ),
        (MPICH, "os.kill(os.getpid(), 9)", None, "EXIT CODE: 9"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    program: str, how: str, code: int | None, said: str, tmp_path: Path, start: Start
) -> None:
    ended = start(FAIL.replace("HOW", how), mpirun.command(program, 2, tmp_path)).end()
    assert ended.code == code if code else ended.code not in (0, 124)
    assert said in ended.out + ended.err


@pytest.mark.parametrize(
    ("wait", "called"),
    [
        ("world.barrier()", "all_reduce of float32[]"),
        pytest.param("dist.recv(torch.ones(1), 1)", "recv of float32[1]", marks=pytest.mark.long),
    ],
    ids=["collective", "message"],
)
def test_a_rank_that_never_comes_is_named(wait: str, called: str, tmp_path: Path, start: Start) -> None:
    ended = start(HANG.replace("WAIT", wait), mpirun.command(OPEN_MPI, 2, tmp_path)).end()
    assert ended.code == 124, ended.err
    assert "refused: rank 1 on" in ended.out
    assert "rank 1 of 2" in ended.err
    assert "did not arrive: it is at" in ended.err
    assert f"in {called} at" in ended.err


@pytest.mark.parametrize(
    ("program", "library", "said"),
    [
        # Else each rank would be a world of one.
        (MPICH, "libmpi.so.40", r"Open MPI.*whose world has 1 rank\(s\): it is not the launcher's MPI"),
        pytest.param(
            *(OPEN_MPI, "/nowhere/libmpi.so", "mpi4py finds no MPI library: /nowhere/libmpi.so"),
            marks=pytest.mark.long,
        ),
        ("shoal run", "", "found: shoal run starts processes that are not MPI ranks"),
    ],
)
def test_what_is_no_mpi_is_refused(
    program: str, library: str, said: str, tmp_path: Path, start: Start
) -> None:
    launcher: str | list[str] = program
    if library:
        launcher = mpirun.command(program, 2, tmp_path, f"MPI4PY_LIBMPI={library}")
    ended = start("import shoal; shoal.init(backend='mpi')", launcher).end()
    assert ended.code != 0
    assert re.search(said, ended.err, re.DOTALL), ended.err
