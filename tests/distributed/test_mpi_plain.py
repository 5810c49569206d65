"""`import shoal.mpi`: `init_process_group("mpi")` in scripts without another call of Shoal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import mpirun
from helpers.cluster.slurm import Cluster
from helpers.mpirun import AS_ROOT
from helpers.scripts import Script

pytestmark = [pytest.mark.processes, pytest.mark.system]

Start = Callable[..., Script]

PLAIN = """
import sys
import torch.distributed as dist
import shoal.mpi

BEFORE
dist.init_process_group("mpi")
print("size", dist.get_world_size())
AFTER
"""


@pytest.mark.parametrize("launcher", ["shoal run", "torchrun"])
def test_launchers_that_start_no_ranks_of_mpi(launcher: str, start: Start) -> None:
    ended = start(PLAIN.replace("BEFORE", "").replace("AFTER", ""), launcher).end()
    assert ended.code != 0
    assert f"found: {launcher} starts processes that are not MPI ranks" in ended.err
    assert "fix:   use mpirun -n 4 python train.py" in ended.err


def test_one_process_without_a_launcher(start: Start) -> None:
    ended = start(PLAIN.replace("BEFORE", "").replace("AFTER", "dist.barrier()"), "alone").end()
    assert (ended.code, ended.out) == (0, "size 1\n"), ended.err


def test_without_mpi4py(tmp_path: Path, start: Start) -> None:
    script = PLAIN.replace("BEFORE", "sys.modules['mpi4py'] = None").replace("AFTER", "")
    ended = start(script, mpirun.command(mpirun.PROGRAMS[0], 2, tmp_path)).end()
    assert ended.code != 0
    assert "found: the package mpi4py is not installed" in ended.err


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, start: Start) -> None:
    after = "if dist.get_rank() == 1: raise ValueError('broken')\ndist.barrier()"
    script = PLAIN.replace("BEFORE", "").replace("AFTER", after)
    ended = start(script, mpirun.command(mpirun.PROGRAMS[0], 2, tmp_path)).end()
    assert ended.code not in (0, 124)
    assert "ValueError: broken" in ended.err
    assert ended.out.count("size 2") > 0


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(400)
def test_tasks_of_srun(cluster: Cluster, tmp_path: Path) -> None:
    script = PLAIN.replace("BEFORE", "").replace("AFTER", "dist.barrier()")
    (tmp_path / "script.py").write_text(script)
    command = ["-N2", "-n3", sys.executable, "script.py"]
    done = cluster.run(["srun", "--mpi=pmix", *command], folder=tmp_path, variables=AS_ROOT)
    assert done.stdout.splitlines() == ["size 3"] * 3, done.stderr
    done = cluster.run(["srun", "--mpi=none", *command], folder=tmp_path, variables=AS_ROOT)
    assert done.returncode != 0
    assert "found: srun has started its tasks without MPI" in done.stderr
