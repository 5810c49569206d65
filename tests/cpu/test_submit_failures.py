"""Batch scripts whose ranks fail or are told to end early: what is kept, said and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batch import Fakes, place, run_script, write
from shoal.submit.folder import read_failure
from shoal.submit.request import Request
from shoal.submit.site import Site

PLAIN = Site(name="plain")
HOUR = 3600

# As srun does: it starts the ranks, and tells all of them to end when one has failed.
SRUN = """#!/bin/bash
shift
code=0
for rank in 0 1; do RANK=$rank "$@" || code=$?; done
exit $code
"""
# Rank 1 fails, and rank 0 has noticed it before that shows; libraries' messages follow.
FAILS = """
import os, sys
from pathlib import Path
from shoal.environ import failures
from shoal.launching.reports import report_into

rank = int(os.environ["RANK"])
report_into(failures(), rank=rank, size=2)
if rank == 0:
    raise RuntimeError("Connection closed by peer")
raise ValueError("the true reason")
"""
TOLD = """#!/bin/bash
kill -{signal} $PPID
kill -{signal} $$
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "run/jobs/1").mkdir(parents=True)
    found = Fakes(tmp_path / "fakes")
    (found.path / "srun").write_text(SRUN)
    found.set("scontrol", out="JobState=RUNNING Reason=None\n")
    return found


def job(**changes: object) -> Request:
    return Request(**{"script": "train.py", "time": HOUR, **changes})  # type: ignore[arg-type]


def run(
    fakes: Fakes, folder: Path, program: str, *, patience: int = 120, **changes: object
) -> subprocess.CompletedProcess[str]:
    """Run the batch script of a job whose ranks are a program, of Python or with a first line."""
    path = folder / "program"
    path.write_text(program)
    path.chmod(0o755)
    python = str(path) if program.startswith("#!") else sys.executable
    where = place(folder / "run", script=str(path), python=python)
    text = write(job(**changes), PLAIN, where)
    assert "patience=120\n" in text
    return run_script(text.replace("patience=120\n", f"patience={patience}\n"), fakes)


def test_the_true_traceback_is_the_last_thing_in_the_log(fakes: Fakes, tmp_path: Path) -> None:
    done = run(fakes, tmp_path, FAILS)
    assert done.returncode == 1
    last = done.stderr.rpartition("shoal: 42 failed:\n")[2].splitlines()
    assert last[0].startswith("Traceback")
    assert last[-2] == "ValueError: the true reason"
    assert last[-1].startswith("where: rank 1 of 2 on ")
    assert f"{tmp_path}/program:11" in last[-1]
    assert read_failure(tmp_path / "run/jobs/1") == tuple(last[-2:])
    kept = {path.name for path in (tmp_path / "run/jobs/1").iterdir()}
    assert kept == {"ends", "failure"}


def test_what_ends_well_leaves_no_failure_of_before(fakes: Fakes, tmp_path: Path) -> None:
    run(fakes, tmp_path, FAILS)
    assert run(fakes, tmp_path, "pass").returncode == 0
    assert read_failure(tmp_path / "run/jobs/1") == ()


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_rank_told_to_end_before_it_can_save_is_requeued(
    signal: str, fakes: Fakes, tmp_path: Path
) -> None:
    """Slurm tells all processes of a step; while Python imports, none handles a signal."""
    done = run(fakes, tmp_path, TOLD.format(signal=signal))
    assert done.returncode == 75
    assert fakes.calls("scontrol")[-1] == ["scontrol", "requeue", "42"]


def test_a_signal_to_the_program_alone_is_a_failure(fakes: Fakes, tmp_path: Path) -> None:
    """Programs that guard a machine's memory send SIGTERM too."""
    done = run(fakes, tmp_path, "#!/bin/bash\nkill -TERM $$\n")
    assert done.returncode == 143
    assert ["scontrol", "requeue", "42"] not in fakes.calls("scontrol")


@pytest.mark.parametrize(("started", "code"), [("20:13:54", 75), ("20:13:40", 1)])
def test_a_node_that_died_and_came_back_does_not_end_the_job(
    started: str, code: int, fakes: Fakes, tmp_path: Path
) -> None:
    """Its daemon has started after the job; ranks on other nodes fail since their peers are gone."""
    times = f"StartTime=2026-11-22T20:13:41 SlurmdStartTime=2026-11-22T{started}"
    fakes.set("scontrol", out=f"JobState=RUNNING Reason=None {times}\n")
    done = run(fakes, tmp_path, FAILS)
    assert done.returncode == code
    assert (["scontrol", "requeue", "42"] in fakes.calls("scontrol")) == (code == 75)
    assert bool(read_failure(tmp_path / "run/jobs/1")) == (code == 1)


def test_a_launcher_that_never_ends_after_a_failure_is_ended(fakes: Fakes, tmp_path: Path) -> None:
    """srun on a real Slurm, of which a node was killed and revived."""
    (fakes.path / "srun").write_text(SRUN.replace("exit $code", "while :; do sleep 1; done"))
    assert run(fakes, tmp_path, "raise SystemExit(3)", patience=0).returncode == 3


def test_a_job_is_put_back_after_so_many_failures(fakes: Fakes, tmp_path: Path) -> None:
    for number in range(1, 4):
        done = run(fakes, tmp_path, "raise SystemExit(3)", restarts=2)
        assert done.returncode == 3
        requeued = [call for call in fakes.calls("scontrol") if call[1] == "requeue"]
        assert len(requeued) == min(number, 2)
    assert "ended with 3 and goes back into the queue" not in done.stdout


def test_a_cancelled_job_is_not_put_back_after_a_failure(fakes: Fakes, tmp_path: Path) -> None:
    fakes.set("scontrol", out="JobState=CANCELLED Reason=None\n")
    assert run(fakes, tmp_path, "raise SystemExit(3)", restarts=2).returncode == 3
    assert ["scontrol", "requeue", "42"] not in fakes.calls("scontrol")


def test_a_chain_goes_on_after_a_failure(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "run/jobs/1/jobs").write_text("42\n43\n")
    over = tmp_path / "run/jobs/1/over"
    assert run(fakes, tmp_path, "raise SystemExit(3)", restarts=1, chain=2).returncode == 3
    assert not over.exists()
    assert run(fakes, tmp_path, "raise SystemExit(3)", restarts=1, chain=2).returncode == 3
    assert over.exists()
