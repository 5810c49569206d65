"""Launches that would become N worlds of one, or half a world, on the real cluster: refused at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.slurm import Cluster
from commands import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

WHERE = """
from shoal.environ import placement

place = placement()
print(place.rank, place.size, place.launcher)
"""

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    """The command that says where it is."""
    (tmp_path / "where.py").write_text(WHERE)
    return [sys.executable, "where.py"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            "salloc -N1 -n2 --ntasks-per-node=2 srun -n1",
            ["SLURM_NTASKS=1, SLURM_NTASKS_PER_NODE=2", "drop --ntasks"],
        ),
        (
            "salloc -N2 -n2 srun mpirun.openmpi --mca plm isolated --mca ras ^slurm -n 1",
            ["OMPI_COMM_WORLD_SIZE=1, SLURM_STEP_NUM_TASKS=2", "each would be a world of its own"],
        ),
        (
            "salloc -N2 -n2 srun mpirun.mpich -launcher fork -n 1",
            ["PMI_SIZE=1, SLURM_STEP_NUM_TASKS=2", "each would be a world of its own"],
        ),
    ],
    ids=["ntasks", "Open MPI", "MPICH"],
)
def test_refused_with_the_variables_and_what_to_type(
    start: str, said: list[str], cluster: Cluster, where: list[str], tmp_path: Path
) -> None:
    done = cluster.run([*start.split(), *where], folder=tmp_path, variables=AS_ROOT)
    assert done.returncode != 0
    assert not done.stdout
    for text in said:
        assert text in done.stderr, done.stderr
    assert "fix:" in done.stderr


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_ranks_are_slurms_whatever_mpi_it_speaks_and_without_its_programs(
    mpi: str, cluster: Cluster, where: list[str], tmp_path: Path
) -> None:
    """FAILURES 15: `scontrol` is not to be found."""
    command = ["srun", f"--mpi={mpi}", "-N2", "-n3", "env", "PATH=/none", *where]
    done = cluster.run(command, folder=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0 3 srun", "1 3 srun", "2 3 srun"], done.stderr


def test_a_batch_script_is_no_task(cluster: Cluster, where: list[str], tmp_path: Path) -> None:
    """FAILURES 12."""
    wrapped = f"--wrap={' '.join(where)}"
    submitted = cluster.run(["sbatch", "-N2", "-n4", "-o", "log", wrapped], folder=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and log.read_text() == "0 1 none\n")
