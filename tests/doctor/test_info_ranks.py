"""`shoal info` in every rank of a launch: printed once, with a row for each rank."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.rank_facts import SHOAL, call, environment, words
from helpers.ranks import free_port

pytestmark = pytest.mark.processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
INFO = [*SHOAL, "info"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def say(command: list[str], **more: str) -> str:
    done = call(command, COLUMNS=120, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(text: str, launcher: str, ranks: int) -> None:
    assert text.count("Decisions and their reasons") == 1
    assert re.search(rf"^launcher +{launcher} +\S", text, re.MULTILINE)
    table = text.partition(f"{ranks} ranks\n")[2]
    assert re.findall(r"^(\d+) +\S+ +(\d+) +\d+ +\d+ +\S+", table, re.MULTILINE) == [
        (str(rank), str(rank)) for rank in range(ranks)
    ]
    assert "Shoal, Python and torch are the same on all ranks." in table
    assert "\x1b" not in text


@pytest.mark.long
def test_under_torchrun() -> None:
    text = say([*TORCHRUN, "--nproc-per-node", "2", *INFO])
    check(text, "torchrun", 2)
    assert "not OMP_NUM_THREADS=1: torchrun sets it if the user has not" in text


@pytest.mark.system
@pytest.mark.parametrize(
    ("mpirun", "launcher"),
    [("mpirun.openmpi", "Open MPI"), pytest.param("mpirun.mpich", "Hydra", marks=pytest.mark.long)],
)
def test_under_mpirun(mpirun: str, launcher: str) -> None:
    path = shutil.which(mpirun)
    if path is None:
        pytest.skip(f"needs {mpirun}")
    more = ["--oversubscribe"] if "openmpi" in mpirun else []
    check(say([path, *more, "-n", "2", *INFO], **AS_ROOT), launcher, 2)


OTHER = """
import sys, torch
torch.__version__ = "2.11.0"
sys.argv = ["shoal", "info"]
from shoal.cli.main import main
main()
"""


@pytest.mark.full
def test_a_rank_with_another_torch_is_named(tmp_path: Path) -> None:
    """FAILURES 25: before training too, where somebody asks."""
    (tmp_path / "other.py").write_text(OTHER)
    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = free_port()
    started = [
        subprocess.Popen(
            command,
            env=environment(**shared, COLUMNS=120, RANK=rank, LOCAL_RANK=rank),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, command in (("0", INFO), ("1", [sys.executable, str(tmp_path / "other.py")]))
    ]
    try:
        first, second = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    line = words(first.partition("torch differs")[2])
    assert "on 1 of 2 ranks, 2.11.0, built for the CPU on rank 1 (" in line
    assert second == ""
