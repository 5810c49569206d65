"""Batch scripts whose ranks fail or are told to end early: what is kept, said and started again."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.fake_slurm import PLAIN, Fakes, place, request, run_script, write
from shoal.tools.submit.status import read_failure

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
from shoal.distributed.env_vars import failures
from shoal.distributed.failure import report_into

rank = int(os.environ["RANK"])
report_into(failures(), rank=rank, size=2)
if rank == 0:
    raise RuntimeError("Connection closed by peer")
raise ValueError("the true reason")
"""
FAIL = "raise SystemExit(3)"


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "run/jobs/1").mkdir(parents=True)
    found = Fakes(tmp_path / "fakes")
    (found.path / "srun").write_text(SRUN)
    found.set("scontrol", out="JobState=RUNNING Reason=None\n")
    return found


def run(
    fakes: Fakes, folder: Path, program: str, *, patience: int = 120, **changes: object
) -> subprocess.CompletedProcess[str]:
    """Run the batch script of a job whose ranks are a program, of Python or with a first line."""
    path = folder / "program"
    path.write_text(program)
    path.chmod(0o755)
    python = str(path) if program.startswith("#!") else sys.executable
    where = place(folder / "run", script=str(path), python=python)
    text = write(request(**changes), PLAIN, where)
    assert ("patience=120\n" in text) == (changes.get("launcher") != "torchrun")
    text = text.replace("patience=120\n", f"patience={patience}\n")
    return run_script(text, fakes, {"SLURM_JOB_NODELIST": "node[01-02]"})


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
    assert run(fakes, tmp_path, "pass").returncode == 0
    assert read_failure(tmp_path / "run/jobs/1") == ()


@pytest.mark.parametrize(
    ("program", "launcher", "code"),
    [
        # Slurm tells all processes of a step; while Python imports, none handles a signal.
        ("kill -USR1 $PPID\nkill -USR1 $$\n", "srun", 75),
        ("kill -TERM $PPID\nkill -TERM $$\n", "srun", 75),
        # A signal to the program alone is a failure: guards of memory send it too.
        ("kill -TERM $$\n", "srun", 143),
        # Its agents get the signal and exit with 1, as they do when a rank fails.
        ("kill -TERM $PPID\nexit 1\n", "torchrun", 75),
        ("exit 1\n", "torchrun", 1),
    ],
)
def test_ranks_told_to_end_before_they_can_save_are_requeued(
    program: str, launcher: str, code: int, fakes: Fakes, tmp_path: Path
) -> None:
    assert run(fakes, tmp_path, f"#!/bin/bash\n{program}", launcher=launcher).returncode == code
    assert (["scontrol", "requeue", "42"] in fakes.calls("scontrol")) == (code == 75)


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


@pytest.mark.full
def test_a_launcher_that_never_ends_after_a_failure_is_ended(fakes: Fakes, tmp_path: Path) -> None:
    """srun on a real Slurm, of which a node was killed and revived."""
    (fakes.path / "srun").write_text(SRUN.replace("exit $code", "while :; do sleep 1; done"))
    assert run(fakes, tmp_path, FAIL, patience=0).returncode == 3


def test_a_job_is_put_back_after_so_many_failures(fakes: Fakes, tmp_path: Path) -> None:
    for number in range(1, 4):
        done = run(fakes, tmp_path, FAIL, restarts=2)
        assert done.returncode == 3
        requeued = [call for call in fakes.calls("scontrol") if call[1] == "requeue"]
        assert len(requeued) == min(number, 2)
    assert "ended with 3 and is requeued" not in done.stdout
    # Nor is a cancelled one.
    fakes.set("scontrol", out="JobState=CANCELLED Reason=None\n")
    assert run(fakes, tmp_path, FAIL, restarts=4).returncode == 3
    assert len([call for call in fakes.calls("scontrol") if call[1] == "requeue"]) == 2


def test_the_same_failure_twice_in_a_row_ends_a_job(fakes: Fakes, tmp_path: Path) -> None:
    """Unless it may pass."""
    away, bad = "OSError(5, 'away')", "ValueError()"
    for step, error, requeued in [(7, bad, 1), (9, away, 2), (9, away, 3), (9, bad, 4), (9, bad, 4)]:
        raises = f"note_step(error := {error}, {step})\nraise error  # "
        program = FAILS.replace("raise ValueError", raises)
        imports = "from shoal.distributed.failure import note_step\n"
        done = run(fakes, tmp_path, imports + program, restarts=9)
        assert done.returncode == 1
        assert [call[1] for call in fakes.calls("scontrol")].count("requeue") == requeued
    place = f"rank 1, {tmp_path}/program:13, after step 9"
    assert f"is not restarted: the same failure twice in a row: {place}\n" in done.stderr


def test_a_chain_goes_on_after_a_failure(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "run/jobs/1/jobs").write_text("42\n43\n")
    for is_over in (False, True):
        assert run(fakes, tmp_path, FAIL, restarts=1, chain=2).returncode == 3
        assert (tmp_path / "run/jobs/1/over").exists() == is_over


def logging(fakes: Fakes, folder: Path) -> None:
    """Let ranks print into the job's log, which has lines of an attempt before, as srun does."""
    log = folder / "run/jobs/1/log.txt"
    log.write_text("Traceback of an attempt before\nValueError: old\n")
    start = f'#!/bin/bash\nexec >> "{log}" 2>&1\n'
    ranks = SRUN.replace("RANK=$rank", "SLURM_PROCID=$rank RANK=$rank")
    (fakes.path / "srun").write_text(ranks.replace("#!/bin/bash\n", start))


ODD = "import os, signal, sys\nif os.environ['RANK'] == '1':\n    "


@pytest.mark.parametrize(
    ("does", "said", "code"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", 1),
        ("sys.exit('the data are not there')", "the data are not there", 1),
        ("sys.exit(3)", "ended with exit code 3", 3),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 was killed by SIGKILL (signal 9), often because the system ran out of memory",
            137,
        ),
    ],
)
def test_a_rank_that_left_no_report_is_named_with_what_it_printed_last(
    does: str, said: str, code: int, fakes: Fakes, tmp_path: Path
) -> None:
    """It failed before `shoal.init`, called sys.exit or was killed."""
    logging(fakes, tmp_path)
    done = run(fakes, tmp_path, ODD + does, processes=2)
    place = f"where: rank 1 of 2 on {socket.gethostname()} (exit code {code})"
    assert done.returncode == code
    assert read_failure(tmp_path / "run/jobs/1") == (said, place)
    assert done.stderr.splitlines()[-2:] == [said, place]
    assert "old" not in (tmp_path / "run/jobs/1/failure").read_text()


def test_a_killed_rank_counts_before_errors_of_others_that_noticed(
    fakes: Fakes, tmp_path: Path
) -> None:
    logging(fakes, tmp_path)
    program = FAILS.replace('raise ValueError("the true reason")', "os.kill(os.getpid(), 9)")
    run(fakes, tmp_path, program, processes=2)
    assert read_failure(tmp_path / "run/jobs/1")[0].startswith(
        "rank 1 was killed by SIGKILL (signal 9)"
    )


def test_where_all_of_a_step_is_killed_slurms_own_words_are_kept(fakes: Fakes, tmp_path: Path) -> None:
    """By an out-of-memory handler of Slurm, with the shells around its ranks."""
    log = tmp_path / "run/jobs/1/log.txt"
    words = "slurmstepd: error: Detected 1 oom_kill event in StepId=42.0. Some processes were killed."
    (fakes.path / "srun").write_text(f'#!/bin/bash\necho "{words}" >> {log}\nexit 137\n')
    assert run(fakes, tmp_path, "pass").returncode == 137
    assert read_failure(tmp_path / "run/jobs/1") == (
        words,
        "where: 42 on node[01-02], exit code 137; no rank has written a report",
    )


TORCHRUN = """#!/bin/bash
cat >> {log} <<'END'
Traceback (most recent call last):
ModuleNotFoundError: No module named 'x'
E1122 20:11:02.8 41 torch/distributed/elastic/api.py:984] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_20:11:02
  host      : node02
  rank      : 1 (local_rank: 0)
  exitcode  : 1 (pid: 57)
END
exit 1
"""


def test_under_torchrun_its_own_report_names_the_rank(fakes: Fakes, tmp_path: Path) -> None:
    log = tmp_path / "run/jobs/1/log.txt"
    (fakes.path / "srun").write_text(TORCHRUN.format(log=log))
    run(fakes, tmp_path, "pass", launcher="torchrun", nodes=2, processes=2)
    assert read_failure(tmp_path / "run/jobs/1") == (
        "ModuleNotFoundError: No module named 'x'",
        "where: rank 1 of 2 on node02 (exit code 1)",
    )
