"""backend="mpi" under Open MPI and MPICH: how runs are stopped, fail, hang, and are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers import mpirun
from helpers.commands import Command, Ended
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
import os, signal, sys, time
from pathlib import Path
import torch, shoal

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


def digest(ended: Ended) -> str:
    found = re.findall(r"digest (\w+)", ended.out)
    assert found, ended.out + ended.err
    return str(found[-1])


@pytest.mark.long
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpirun.mpich"])
def test_stopped_and_resumed_it_ends_bit_equal(program: str, tmp_path: Path) -> None:
    """A signal to one rank; saves go on beside the training, over a group of their own."""
    stopped = mpirun.run(program, 2, TRAIN, tmp_path, "whole", "stopped")
    assert stopped.code == REQUEUE, stopped.err
    saved = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-8"
    (tmp_path / "stopped").rename(tmp_path / "resumed")
    resumed = mpirun.run(program, 2, TRAIN, tmp_path, "resumed")
    assert resumed.code == 0, resumed.err
    assert digest(resumed) == digest(stopped)


@pytest.mark.parametrize(
    ("program", "how", "said"),
    [
        ("mpirun.openmpi", "raise ValueError('broken')", "ValueError: broken"),
        pytest.param(
            "mpirun.openmpi", "os.kill(os.getpid(), 9)", "exited on signal 9", marks=pytest.mark.long
        ),
        ("mpirun.mpich", "os.kill(os.getpid(), 9)", "EXIT CODE: 9"),
    ],
)
def test_a_rank_that_fails_ends_the_others(program: str, how: str, said: str, tmp_path: Path) -> None:
    ended = mpirun.run(program, 2, FAIL.replace("HOW", how), tmp_path)
    assert ended.code not in (0, 124)
    assert said in ended.out + ended.err


def test_a_rank_that_leaves_with_a_code_ends_the_others(tmp_path: Path) -> None:
    ended = mpirun.run("mpirun.openmpi", 2, FAIL.replace("HOW", "sys.exit(3)"), tmp_path)
    assert ended.code == 3


@pytest.mark.parametrize(
    ("wait", "called"),
    [
        ("world.barrier()", "all_reduce of float32[]"),
        pytest.param("dist.recv(torch.ones(1), 1)", "recv of float32[1]", marks=pytest.mark.long),
    ],
    ids=["collective", "message"],
)
def test_a_rank_that_never_comes_is_named(wait: str, called: str, tmp_path: Path) -> None:
    ended = mpirun.run("mpirun.openmpi", 2, HANG.replace("WAIT", wait), tmp_path)
    assert ended.code == 124, ended.err
    assert "refused: rank 1 on" in ended.out
    assert "rank 1 of 2" in ended.err
    assert "did not arrive: it is at" in ended.err
    assert f"in {called} at" in ended.err


def test_the_mpi_of_another_launcher_is_refused(tmp_path: Path) -> None:
    """Else each rank would be a world of one."""
    command = mpirun.command("mpirun.mpich", 2, tmp_path)
    (tmp_path / "script.py").write_text("import shoal; shoal.init(backend='mpi')")
    started = Command(["env", "MPI4PY_LIBMPI=libmpi.so.40", *command, "script.py"], tmp_path)
    try:
        ended = started.end()
    finally:
        started.clean_up()
    assert ended.code != 0
    assert "Open MPI" in ended.err
    assert "whose world has 1 rank(s): it is not the launcher's MPI" in ended.err


@pytest.mark.long
def test_no_library_of_mpi(tmp_path: Path) -> None:
    command = mpirun.command("mpirun.openmpi", 2, tmp_path)
    (tmp_path / "script.py").write_text("import shoal; shoal.init(backend='mpi')")
    started = Command(["env", "MPI4PY_LIBMPI=/nowhere/libmpi.so", *command, "script.py"], tmp_path)
    try:
        ended = started.end()
    finally:
        started.clean_up()
    assert ended.code != 0
    assert "found: mpi4py finds no MPI library: /nowhere/libmpi.so" in ended.err


def test_a_launcher_without_mpi_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import shoal; shoal.init(backend='mpi')")
    started = Command([sys.executable, "-m", "shoal", "run", "-n", "2", "script.py"], tmp_path)
    try:
        ended = started.end()
    finally:
        started.clean_up()
    assert ended.code == 1
    assert "found: shoal run starts processes that are not MPI ranks" in ended.err
