"""The batch script for PBS under a real Slurm, which reads `#PBS` lines, with names of PBS for its own.

Debian's wrapper `qsub` does the same, but excludes Grid Engine from the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.scripts import trained, trained_alone
from helpers.submitted_jobs import Jobs

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(900)]

SITE = """
scheduler = "pbs"
lead = "30"
mpirun = ["mpirun.openmpi", "--map-by", "ppr:{per_node}:node"]
[partitions.main]
"""

# The directory of -o would be the name of a file for Slurm. The rest is what PBS sets for a job.
QSUB = """#!/bin/bash
sed '/^# Written by/i . {folder}/pbs.sh' "${{@: -1}}" > {folder}/as-slurm.sh
number=$(sbatch --parsable --output=/dev/null {folder}/as-slurm.sh) && echo "$number.mini"
"""
VARIABLES = """
export PBS_JOBID=$SLURM_JOB_ID.mini PBS_NODEFILE={folder}/nodes-$SLURM_JOB_ID
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_NTASKS" hostname | sort > "$PBS_NODEFILE"
"""


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    folder = tmp_path / "a run"
    (folder / "config/shoal/sites").mkdir(parents=True)
    (folder / "config/shoal/sites/lab.toml").write_text(SITE)
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "pbs.sh").write_text(VARIABLES.format(folder=tmp_path))
    for name, text in {"qsub": QSUB, "qstat": "#!/bin/bash\n", "qdel": "#!/bin/bash\n"}.items():
        (programs / name).write_text(text.format(folder=tmp_path))
        (programs / name).chmod(0o755)
    found = Jobs(cluster, folder)
    path = cluster.environment()["PATH"]
    found.variables |= {"SHOAL_SITE": "lab", "PATH": f"{programs}:{path}"}
    yield found
    cluster.run(["scancel", "--user=root"])
    found.wait(found.gone)


def test_a_job_that_is_told_to_save_continues_as_a_new_one(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = trained_alone(tmp_path / "alone")
    number = jobs.submit("-p", "main", "--nodes=2", "-n", "4", "train.py", "--", "4", "2", "run")
    jobs.wait_for_step(3)
    jobs.command("scancel", "--batch", "--signal=USR1", number)
    jobs.wait_for_codes(75, 0)
    assert trained(jobs.log()) == [alone], jobs.log()
    assert "resumed at sample" in jobs.log()
    assert [job for job, _ in jobs.ends()] == [f"{number}.mini", f"{int(number) + 1}.mini"]
    assert "finished" in jobs.shoal("status", "run")


def test_a_job_that_is_cancelled_sees_the_mark(jobs: Jobs) -> None:
    jobs.submit("-p", "main", "--nodes=2", "-n", "2", "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(2)
    jobs.shoal("cancel", "run")
    jobs.wait_for_codes(75)
    jobs.wait_for_log("has saved and is cancelled")
    assert list((jobs.folder / "run/checkpoints").glob("step-*"))
