"""The same script and the same result under a real Slurm, however its tasks are laid out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for
from helpers.mpirun import AS_ROOT
from helpers.scripts import AGREEING, trained, trained_alone

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(400)]

SUMS = """
import torch, shoal

with shoal.init(backend="mpi") as world:
    total = world.all_reduce(torch.full((2,), world.rank + 1.0))
    (library,) = [choice.reason for choice in world.decisions if choice.what == "backend"]
    world.print(f"{total.tolist()} by {library.removeprefix('given; ')}")
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(AGREEING)
    return [sys.executable, str(tmp_path / "train.py")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained_alone(tmp_path_factory.mktemp("alone"))


STARTED = {
    "srun": "srun -N2 -n3 {script} 3 0 run",
    "srun inside salloc": "salloc -N3 --ntasks-per-node=1 srun -N2 -n2 --relative=1 {script} 2 0 run",
    "arbitrary": "env SLURM_HOSTFILE=hosts srun -m arbitrary -n3 {script} 3 0 run",
    "heterogeneous": "salloc -N1 -n1 : -N1 -n2 srun --het-group=0,1 {script} 3 0 run",
    "pmi2": "srun --mpi=pmi2 -N2 -n2 {script} 2 0 run",
    "pmix": "srun --mpi=pmix -N2 -n2 {script} 2 0 run",
    "Open MPI": "salloc -N2 -n3 mpirun.openmpi -n 3 {script} 3 0 run",
    "MPICH": "salloc -N2 -n3 mpirun.mpich -n 3 {script} 3 0 run",
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.long] * (how != "srun")) for how in STARTED]
)
def test_the_same_script_reaches_the_same_parameters(
    how: str, cluster: Cluster, alone: list[float], script: list[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node03\nnode01\nnode03\n")
    command = STARTED[how].format(script=" ".join(script)).split()
    done = cluster.run(command, folder=tmp_path, variables=AS_ROOT)
    assert done.returncode == 0, done.stderr
    assert trained(done.stdout) == [alone]


@pytest.mark.long
def test_srun_starts_ranks_of_mpi(cluster: Cluster, tmp_path: Path) -> None:
    """By PMIx, on two nodes; and where it says nothing of MPI they are refused, not N worlds of one."""
    (tmp_path / "sums.py").write_text(SUMS)
    srun, command = ["srun", "-N2", "-n3"], [sys.executable, "sums.py"]
    by_pmix = {**AS_ROOT, "SLURM_MPI_TYPE": "pmix"}
    done = cluster.run([*srun, *command], folder=tmp_path, variables=by_pmix)
    assert done.stdout.splitlines()[-1].startswith("[6.0, 6.0] by mpi4py"), done.stderr
    assert "Open MPI" in done.stdout
    done = cluster.run([*srun, "--mpi=none", *command], folder=tmp_path, variables=AS_ROOT)
    assert done.returncode != 0
    assert "found: srun has started its tasks without MPI" in done.stderr
    assert "fix:   use srun --mpi=pmix" in done.stderr


def test_two_steps_of_one_job_on_one_node_do_not_clash(
    cluster: Cluster, alone: list[float], script: list[str], tmp_path: Path
) -> None:
    """FAILURES 16: with four ports for both."""
    step = f"srun --exact -n2 {' '.join(script)} 2 0"
    both = f"{step} one & first=$!; {step} two & second=$!; wait $first && wait $second"
    done = cluster.run(
        ["salloc", "-N1", "-n4", "bash", "-c", both],
        folder=tmp_path,
        variables={"SHOAL_PORTS": "17401-17404"},
    )
    assert done.returncode == 0, done.stderr
    assert trained(done.stdout) == [alone] * 2


def test_the_same_command_after_a_requeue(
    cluster: Cluster, alone: list[float], script: list[str], tmp_path: Path
) -> None:
    """FAILURES 10: a job put back in the middle; its own text, run again, goes on where it was."""
    (tmp_path / "train.py").write_text(AGREEING.replace("run.tick()", "run.tick(every=1)"))
    job = tmp_path / "job.sh"
    text = ["#!/bin/bash", "#SBATCH -N2 -n2 --requeue --open-mode=append -o log"]
    job.write_text("\n".join([*text, f"srun {' '.join(script)} 2 0.2 run", ""]))
    number = cluster.run(["sbatch", "--parsable", "job.sh"], folder=tmp_path).stdout.strip()
    log = tmp_path / "log"

    def told() -> str:
        return log.read_text() if log.exists() else "no log"

    wait_for(lambda: any((tmp_path / "run/checkpoints").glob("step-3")), every=0.1, told=told)
    assert cluster.run(["scontrol", "requeue", number]).returncode == 0
    wait_for(lambda: trained(told()) != [], every=0.1, told=told)
    assert trained(told()) == [alone]
    assert "attempt 1 with" in told()
