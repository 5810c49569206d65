"""`shoal status` of one run and of all, and what is looked at before a job waits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from typer.testing import Result

from helpers.cli import fake_slurm, refused, shoal
from helpers.fake_slurm import Fakes
from shoal.tools.submit.slurm.queue import parse_queue, why_never


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return fake_slurm(tmp_path, monkeypatch, submitted="42\n", script="import shoal\n")


def submit(*arguments: str) -> Result:
    return shoal("submit", "--time", "1:00:00", *arguments)


def test_what_waiting_alone_does_not_end() -> None:
    never = (
        "(QOSMaxWallDurationPerJobLimit)",
        "(QOSMaxNodePerJobLimit)",
        "(AssocMaxWallDurationPerJobLimit)",
        "(PartitionTimeLimit)",
        "(ReqNodeNotAvail, UnavailableNodes:node05)",
        "(DependencyNeverSatisfied)",
        "(JobHeldUser)",
    )
    by_itself = (
        *("(Priority)", "(Resources)", "(Dependency)", "(QOSMaxJobsPerUserLimit)"),
        *("(QOSMaxGRESPerUser)", "(QOSGrpCpuLimit)", "(AssocMaxJobsLimit)", "(BeginTime)"),
    )
    for reason in never + by_itself:
        assert bool(why_never("PENDING", reason)) == (reason in never), reason


def test_status_says_why_a_job_will_not_start_or_has_failed(fakes: Fakes) -> None:
    submit("train.py")
    fakes.set("squeue", out="42|PENDING|0:00|1:00:00|(PartitionTimeLimit)\n")
    said = shoal("status", "runs/train").output
    assert "job 42 can never start: it requests more time than its partition" in said
    [running] = parse_queue("1|RUNNING|0:01|1:00|QOSMaxNodePerJobLimit\n")
    assert (running.phase, running.never_starts) == ("running", "")
    fakes.set("squeue")
    folder = Path("runs/train/jobs/1")
    (folder / "ends").write_text(f"42 0 1 {time.time():.0f}\n")
    place = "where: rank 1 of 2 on node02, train.py:7 (the other was stopped)"
    (folder / "failure").write_text(f"Traceback …\nValueError: bad\n{place}\n")
    said = shoal("status", "runs/train").output
    assert "ValueError: bad" in said
    assert place in said


def test_status_without_a_run_lists_all(fakes: Fakes) -> None:
    assert "no run in runs/" in refused("status").found
    submit("train.py")
    fakes.set("sbatch", out="43\n")
    submit("--run", "runs/other", "train.py")
    Path("runs/other/jobs/1/ends").write_text(f"43 0 3 {time.time():.0f}\n")
    lines = shoal("status").output.splitlines()
    assert [line.split()[:3] for line in lines if "runs/" in line] == [
        ["runs/other", "43", "failed"],
        ["runs/train", "42", "gone"],
    ]


def test_status_without_a_run_lists_those_submitted_from_elsewhere(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, gone = tmp_path / "scratch/a run", tmp_path / "scratch/gone"
    for run in (gone, scratch, scratch):
        assert submit("--run", str(run), "train.py").exit_code == 0
    gone.rename(tmp_path / "scratch/moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    lines = [line for line in shoal("status").output.splitlines() if "scratch" in line]
    assert [line.partition("  ")[0] for line in lines] == [str(scratch)]
    assert (tmp_path / "state/shoal/runs").stat().st_mode & 0o077 == 0


def test_an_interpreter_is_looked_at_before_the_queue(fakes: Fakes, tmp_path: Path) -> None:
    assert submit("--python", sys.executable, "--run", "runs/a", "train.py").exit_code == 0
    python = tmp_path / "python"
    given = ("submit", "--time", "1", "--python", str(python), "train.py")
    assert refused(*given).found == "there is no such program"
    python.write_text("#!/bin/sh\necho shoal 0.0.1\n")
    assert refused(*given).found == "it is not executable"
    python.chmod(0o755)
    assert refused(*given).found.startswith("it has shoal 0.0.1, and this command is shoal ")
    python.write_text("#!/bin/sh\necho importlib.metadata.PackageNotFoundError: shoal >&2\nexit 1\n")
    assert refused(*given).found.startswith("it has no Shoal, and this command is shoal ")
    # One of another machine is left to the nodes, as is a script without Shoal.
    python.write_bytes(b"\x7fELF of elsewhere")
    assert submit("--python", str(python), "--run", "runs/b", "train.py").exit_code == 0
    python.write_text("#!/bin/sh\nexit 1\n")
    Path("train.py").write_text("print('plain')\n")
    assert shoal(*given).exit_code == 0


def test_restarts_need_a_queue_that_takes_jobs_back(fakes: Fakes, tmp_path: Path) -> None:
    folder = tmp_path / "config/shoal/sites"
    folder.mkdir(parents=True)
    (folder / "strict.toml").write_text("requeue = false\n")
    error = refused("submit", "--time=1:00:00", "--site=strict", "--restarts=2", "train.py")
    assert "a restart requeues the job" in error.found
    assert submit("--site=strict", "--restarts=2", "--chain=3", "train.py").exit_code == 0


def test_a_home_in_which_nothing_can_be_written(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of runs does not stop a submission."""
    (tmp_path / "file").touch()
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file/home"))
    done = submit("train.py")
    assert done.exit_code == 0
    assert "note: not in the list of `shoal status`" in done.output
    assert "runs/train" in shoal("status").output
    fakes.set("sinfo", out="main|infinite|8|gpu:8|4|1:8:1\n")
    fakes.set("scontrol", out="ClusterName = mini\n")
    error = refused("sites", "new", "mine")
    assert "Not a directory" in error.found
    assert "XDG_CONFIG_HOME" in error.fix
