"""Launches on the real cluster: those that would be N worlds of one or half a world are errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for
from helpers.mpirun import AS_ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(400)]

WHERE = """
from shoal.distributed.env_vars import placement

place = placement()
print(place.rank, place.size, place.launcher)
"""


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    """The command that says where it is."""
    (tmp_path / "where.py").write_text(WHERE)
    return [sys.executable, "where.py"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            "srun -n1 --ntasks-per-node=2",
            ["SLURM_NTASKS=1, SLURM_NTASKS_PER_NODE=2", "drop --ntasks"],
        ),
        (
            "salloc -N2 -n2 srun mpirun.openmpi --mca plm isolated --mca ras ^slurm -n 1",
            ["OMPI_COMM_WORLD_SIZE=1, SLURM_STEP_NUM_TASKS=2", "each would be a separate world"],
        ),
        (
            "salloc -N2 -n2 srun mpirun.mpich -launcher fork -n 1",
            ["PMI_SIZE=1, SLURM_STEP_NUM_TASKS=2", "each would be a separate world"],
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


# As tutorials write it, and idr_torch leaves it: on three tasks of one node and one of another.
BY_HAND = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    'MASTER_ADDR=node01 MASTER_PORT=12321 exec "$@"'
)


@pytest.mark.parametrize(
    ("command", "size"),
    [
        # `scontrol` is not to be found, whatever MPI Slurm speaks.
        *((f"srun --mpi={mpi} -N2 -n3 env PATH=/none", 3) for mpi in ("none", "pmi2", "pmix")),
        ("srun -N2 -n4 -m plane=3 bash -c BY_HAND --", 4),
        ("salloc -N2 --ntasks-per-node=2 srun --overlap -N1 -n1", 1),  # to try something out in a job
    ],
)
def test_ranks_are_slurms(
    command: str, size: int, cluster: Cluster, where: list[str], tmp_path: Path
) -> None:
    """FAILURES 15: without Slurm's programs too."""
    words = [BY_HAND if word == "BY_HAND" else word for word in command.split()]
    done = cluster.run([*words, *where], folder=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"{rank} {size} srun" for rank in range(size)], done


def test_a_batch_script_is_no_task(cluster: Cluster, where: list[str], tmp_path: Path) -> None:
    """FAILURES 12. `shoal.init` says that the job has room for more."""
    (tmp_path / "where.py").write_text(f"{WHERE}\nimport shoal\nshoal.init()\n")
    wrapped = f"--wrap={' '.join(where)}"
    submitted = cluster.run(["sbatch", "-N2", "-n4", "-o", "log", wrapped], folder=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    log = tmp_path / "log"
    said = "0 1 none\nshoal: one process in a Slurm job with room for 4 (job "
    wait_for(lambda: log.exists() and log.read_text().startswith(said))
