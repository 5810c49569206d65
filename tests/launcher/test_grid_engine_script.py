"""Grid Engine without its daemons: the batch script, and the texts of its commands."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fake_slurm import PLAIN, Fakes, place, request, run_script, write
from shoal.tools.submit.decide import decide
from shoal.tools.submit.gridengine.queue import parse_queue
from shoal.tools.submit.gridengine.scheduler import GridEngine
from shoal.tools.submit.gridengine.site_draft import draft_text
from shoal.tools.submit.scheduler import QueuedJob
from shoal.tools.submit.site_catalog import Partition, Site, read_site
from shoal.util.errors import LaunchError

QUEUE = Partition(name="gpu", option="gpu.q", parallel_environment="mpi-4", gpu_resource="ngpus")
SITE = Site(name="lab", scheduler="gridengine", default="gpu", partitions={"gpu": QUEUE})
EVERYTHING = request(
    nodes=2,
    gpus=4,
    sweep=(("--lr", "0.1"), ("--lr", "0.2")),
    at_once=1,
    constraint="ib",
    account="abc",
    stage=("data",),
    options=("-l exclusive",),
)


def test_each_line_for_grid_engine_has_a_source(repository: Path) -> None:
    """The lines that the script for Slurm has not, each followed by its source."""
    where = place("/scratch/me", stage=("/scratch/me/data",), sweep=EVERYTHING.sweep)
    slurm = write(
        request(nodes=2, processes=8, launcher="mpirun", sweep=EVERYTHING.sweep), PLAIN, where
    )
    lines = write(EVERYTHING, SITE, where).splitlines()
    own = [line for line in lines if line and line not in slurm.splitlines()]
    text = (repository / "tests/launcher/golden/grid-engine.txt").read_text()
    known = [line.rpartition(" | ")[0].rstrip() for line in text.splitlines()]
    assert known == own


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "jobs/1").mkdir(parents=True)
    return Fakes(tmp_path / "fakes", ("mpirun", "qsub", "qstat", "qrsh", "qdel"))


def end(fakes: Fakes, tmp_path: Path, code: int, *, hosts: str = "node01") -> tuple[int, str]:
    """Run the batch script of a job whose mpirun ends with `code`: its exit code and its output."""
    names = hosts.split()
    file = tmp_path / "hosts"
    file.write_text("".join(f"{name} 1 gpu.q@{name} UNDEFINED\n" for name in names))
    asked = request(nodes=len(names), processes=len(names))
    fakes.set("mpirun", code=code)
    variables = {
        "JOB_ID": "7",
        "SGE_TASK_ID": "undefined",
        "HOSTNAME": "node01",
        "JOB_SCRIPT": "spool/7",
    }
    variables |= {"PE_HOSTFILE": str(file), "NHOSTS": str(len(names))}
    done = run_script(write(asked, SITE, place(tmp_path)), fakes, variables)
    return done.returncode, done.stdout + done.stderr


def test_code_99_requeues_a_job_on_one_node(fakes: Fakes, tmp_path: Path) -> None:
    assert end(fakes, tmp_path, 0)[0] == 0
    code, said = end(fakes, tmp_path, 75)
    assert (code, "7 has saved and is requeued" in said) == (99, True)
    fakes.set("qstat", out="  7 0.5 train me dr 01/01/2026 10:00:00 gpu.q@node01 1\n")
    assert end(fakes, tmp_path, 75)[0] == 75  # a user has deleted it
    assert fakes.calls("qsub") == []
    assert [line.split()[1:3] for line in (tmp_path / "jobs/1/ends").read_text().splitlines()] == [
        ["0", "0"],
        ["1", "75"],
        ["2", "75"],
    ]


def test_a_new_job_continues_one_on_several_nodes(fakes: Fakes, tmp_path: Path) -> None:
    fakes.set("qsub", out="8\n")
    assert end(fakes, tmp_path, 75, hosts="node01 node02")[0] == 75
    assert fakes.calls("qsub") == [["qsub", "-terse", "-w", "e", "spool/7"]]
    assert (tmp_path / "jobs/1/jobs").read_text() == "8\n"


def test_each_element_of_an_array_has_a_log(fakes: Fakes, tmp_path: Path) -> None:
    asked = request(sweep=(("a",), ("b",)))
    fakes.set("mpirun", out="trained\n")
    variables = {"JOB_ID": "7", "SGE_TASK_ID": "2", "HOSTNAME": "node01"}
    with (tmp_path / "jobs/1/log.txt").open("a") as log:
        where = place(tmp_path, sweep=asked.sweep)
        done = run_script(write(asked, SITE, where), fakes, variables, stdout=log)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "jobs/1/log-1.txt").read_text() == "trained\n"
    assert (tmp_path / "jobs/1/log.txt").read_text() == ""


@pytest.mark.parametrize(("answers", "code"), [(True, 3), (False, 75)])
def test_a_lost_node_is_no_failure(answers: bool, code: int, fakes: Fakes, tmp_path: Path) -> None:
    fakes.set("qrsh", code=0 if answers else 1)
    fakes.set("qsub", out="8\n")
    ended, said = end(fakes, tmp_path, 3, hosts="node01 node02")
    assert ended == code
    assert ("one of its nodes does not answer" in said) == (not answers)


@pytest.mark.parametrize(
    ("changes", "folder", "found"),
    [
        ({}, "/scratch/me", ""),
        ({}, "/scratch/my runs", ""),
        ({}, "/scratch/it's", "qsub gives a meaning to quotes"),
        ({}, "/scratch/$HOME", "qsub gives a meaning to quotes"),
        ({"name": "a\nb"}, "/scratch", "qsub gives a meaning to quotes"),
        ({"name": "a b"}, "/scratch", "columns of qstat"),
        ({"constraint": "a b"}, "/scratch", "Grid Engine would reject this value"),
        ({"qos": "long"}, "/scratch", "Grid Engine has no such option"),
        ({"options": ("--exclusive",)}, "/scratch", "it is not an option of qsub"),
        ({"nodes": 2, "partition": "other"}, "/scratch", "names no parallel environment"),
    ],
)
def test_what_qsub_reads_differently_is_refused(
    changes: dict[str, object], folder: str, found: str
) -> None:
    if not found:
        assert f"{os.path.basename(folder)}/jobs/1/log.txt" in write(request(), SITE, place(folder))
        return
    with pytest.raises(LaunchError, match=found):
        write(request(**changes), SITE, place(folder))


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("slots 9\nuser_lists  a,b, \\\n            c\n\nallocation_rule    4\n", False),
        ("pe_name\nallocation_rule $round_robin\n", True),
        ("", False),  # qsub answers itself
    ],
)
def test_the_rule_of_a_parallel_environment(
    answer: str, refused: bool, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fakes.path / "qstat").rename(fakes.path / "qconf")
    monkeypatch.setenv("PATH", fakes.variables()["PATH"])
    fakes.set("qstat", out=answer)
    job = decide(request(nodes=2, processes=8), SITE, save=None)
    with pytest.raises(LaunchError, match="allocation rule") if refused else nullcontext():
        GridEngine().check_queue(job)


def test_a_queue_without_a_parallel_environment() -> None:
    site = replace(SITE, partitions={"gpu": replace(QUEUE, parallel_environment="")})
    with pytest.raises(LaunchError, match="names no parallel environment"):
        write(request(nodes=2), site, place("/scratch"))


QSTAT = """\
job-ID  prior   name       user         state submit/start at     queue            slots ja-task-ID
---------------------------------------------------------------------------------------------------
     24 0.50000 train      me           r     11/29/2026 11:00:13 gpu.q@node02         3
     25 0.50000 sweep      me           Rr    11/29/2026 11:00:13 gpu.q@node03         1 2
     25 0.50000 sweep      me           hqw   11/29/2026 11:00:13                      1 3
     26 0.00000 train      me           Eqw   11/29/2026 11:00:13                      4
"""


def test_the_states_of_jobs() -> None:
    assert parse_queue("") == []
    runs, again, waits, fails = parse_queue(QSTAT)
    since = "since 11/29/2026 11:00:13"
    assert runs == QueuedJob(job="24", phase="running", state="r", ran=since, reason="gpu.q@node02")
    assert (again.job, again.phase, again.state) == ("25.2", "running", "Rr")
    assert (waits.job, waits.phase, waits.never_starts) == ("25.3", "waiting", "")
    assert "qstat -j 26" in fails.never_starts


INSTANCES = """\
queuename                      qtype resv/used/tot. load_avg arch          states
gpu.q@node01                   BIP   0/0/8          0.01     lx-amd64
gpu.q@node02                   BIP   0/0/16         0.01     lx-amd64
"""


def test_a_site_is_drafted() -> None:
    queue = "qname gpu.q\npe_list               make mpi-4 \\\n           smp\nh_rt     24:00:00\n"
    site = read_site("lab", draft_text("lab", INSTANCES, {"gpu.q": queue}), "lab.toml")
    found = site.partition(None)
    assert found is not None
    assert (site.scheduler, found.nodes, found.cores, found.time) == ("gridengine", 2, 16, 86400)
    assert found.parallel_environment == "mpi-4"
    assert "environments: mpi-4, smp." in draft_text("lab", INSTANCES, {"gpu.q": queue})
    assert "nodes = 2" in draft_text("lab", INSTANCES, {"gpu.q": "qname\n"})
    with pytest.raises(LaunchError, match="no queue with nodes"):
        draft_text("lab", "", {})
