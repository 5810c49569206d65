"""`shoal submit`, `status`, `logs`, `cancel`, `sites`, with commands that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import fake_slurm, refused, shoal
from helpers.commands import Command
from helpers.fake_slurm import Fakes


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return fake_slurm(tmp_path, monkeypatch, submitted="42;mini\n")


def submitted(*arguments: str) -> str:
    done = shoal("submit", "--time", "1:00:00", *arguments)
    assert done.exit_code == 0, done.exception
    return done.output


def test_a_job_is_submitted_and_told_about(fakes: Fakes) -> None:
    said = submitted("--nodes", "2", "--gpus-per-node", "4", "train.py", "--", "--token", "hunter2")
    assert fakes.calls("sbatch") == [
        ["sbatch", "--parsable", str(Path("runs/train/jobs/1/job.sh").resolve())]
    ]
    assert "job 42: 2 nodes with 4 GPUs, 8 processes, 01:00:00, at most 8 GPU-hours" in said
    for command in ("shoal logs -f runs/train", "shoal status runs/train", "shoal cancel runs/train"):
        assert command in said
    folder = Path("runs/train/jobs/1")
    assert (folder / "source/train.py").read_text() == "print('trained')\n"
    assert folder.stat().st_mode & 0o077 == 0
    record = json.loads((folder / "job.json").read_text())
    assert record["jobs"] == ["42"]
    assert record["command"] == "train.py --token '***'"
    assert "--token and its value are in the job's files" in said


def test_the_source_that_was_submitted_runs(fakes: Fakes) -> None:
    submitted("--python", sys.executable, "train.py")
    Path("train.py").write_text("raise SystemExit('changed afterwards')\n")
    # This srun runs what it is given.
    (fakes.path / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    done = subprocess.run(
        ["bash", "runs/train/jobs/1/job.sh"],
        env={**fakes.variables(), "SLURM_JOB_ID": "42"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_dry_run_prints_the_script_and_makes_nothing(fakes: Fakes) -> None:
    sized = ("--nodes", "2", "--gpus-per-node", "4")
    done = shoal("submit", "--time", "1:00:00", *sized, "--dry-run", "train.py", "--", "a b")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "source/train.py 'a b')\n" in done.stdout  # and no line is folded
    assert "note:" not in done.stdout
    size = "job: 2 nodes with 4 GPUs, 8 processes, 01:00:00, at most 8 GPU-hours\n"
    assert done.stderr.startswith(size)
    unknown = "this site (plain) is unknown: GPUs, partitions and times are not checked"
    assert f"note: {unknown}\n" in done.stderr
    assert "note: signal to save 300 s before its end" in done.stderr
    assert (fakes.calls(), sorted(os.listdir())) == ([], ["train.py"])


def test_a_script_is_kept_and_not_submitted(fakes: Fakes) -> None:
    said = submitted("-o", "my job.sh", "train.py")
    assert "sbatch 'my job.sh'" in said
    assert fakes.calls() == []
    assert Path("my job.sh").read_text().startswith("#!/bin/bash\n")
    assert Path("runs/train/jobs/1/source/train.py").exists()
    assert "no job of `shoal submit`" in refused("status", "runs/other").found
    for command in ("status", "logs", "cancel"):
        error = refused(command, "runs/train")
        assert "-o wrote the script, and Shoal did not submit it" in error.found
        assert error.fix == "follow it with the scheduler's own command"
    submitted("train.py")
    assert shoal("status", "runs/train").exit_code == 0
    # No file of the user's is written over.
    Path("job.sh").write_text("#!/bin/bash\n# by hand\n")
    error = refused("submit", "--time", "1", "-o", "job.sh", "train.py")
    assert "`shoal submit` has not written it" in error.found
    assert Path("job.sh").read_text() == "#!/bin/bash\n# by hand\n"
    assert refused("submit", "--time", "1", "-o", "none/job.sh", "train.py").given == "-o none/job.sh"
    assert not Path("none").exists()
    submitted("-o", "my job.sh", "train.py")


def test_a_chain_is_submitted_one_after_the_other(fakes: Fakes) -> None:
    submitted("--chain", "3", "train.py")
    orders = [[word for word in call if "depend" in word] for call in fakes.calls("sbatch")]
    assert orders == [[], ["--dependency=afterany:42"], ["--dependency=afterany:42"]]
    assert Path("runs/train/jobs/1/jobs").read_text() == "42\n42\n42\n"


def test_a_sweep_is_an_array(fakes: Fakes) -> None:
    Path("sweep.txt").write_text("# rates\n--lr 0.1 --run 'runs/a b'\n\n--lr 0.2\n")
    submitted("--sweep", "sweep.txt", "--at-once", "1", "train.py")
    text = Path("runs/train/jobs/1/job.sh").read_text()
    assert "#SBATCH --array=0-1%1\n" in text
    assert "0) program+=(--lr 0.1 --run 'runs/a b') ;;\n1) program+=(--lr 0.2) ;;\n" in text
    assert "log-%a.txt" in text
    for element in ("2", "-1"):
        error = refused("logs", "--element", element, "runs/train")
        assert "has elements 0 to 1" in error.found
    for lines, found in (("--lr '\n", "No closing quotation"), ("# nothing\n", "no line")):
        Path("sweep.txt").write_text(lines)
        assert found in refused("submit", "--time=1", "--sweep=sweep.txt", "train.py").found
    assert "not an array" in refused("submit", "--time=1", "--at-once=1", "train.py").found


def test_what_can_not_work_is_refused_and_leaves_nothing(fakes: Fakes) -> None:
    for arguments, found in (
        ([], "no time limit"),
        (["--time=1h"], "it is not a duration"),
        (["--time=1:00:00", "--launcher", "aprun"], "--launcher is one of srun, torchrun, mpirun"),
        (["--time=1:00:00", "--site", "nowhere"], "the sites are jean-zay, plain"),
        (["--time=1:00:00", "--gpus-per-node", "4", "-n", "1"], "3 GPU-hours of 4"),
        (["--time=1:00:00", "--run", "."], "train.py is in it"),
        (["--time=1:00:00", "--name", "a\nb"], "a control character"),
    ):
        assert found in refused("submit", *arguments, "train.py").found
    assert "there is no file" in refused("submit", "--time=1:00:00", "none.py").found
    Path("taken").write_text("a file\n")
    assert "taken" in refused("submit", "--time=1:00:00", "--run", "taken", "train.py").given
    assert (fakes.calls("sbatch"), list(Path("runs").glob("*/jobs/*"))) == ([], [])
    # Where it is only objected to, it may be submitted all the same.
    submitted("--gpus-per-node", "4", "-n", "1", "--force", "train.py")
    assert len(fakes.calls("sbatch")) == 1


def test_what_slurm_refuses_leaves_nothing(fakes: Fakes) -> None:
    fakes.set("sbatch", code=1, err="sbatch: error: invalid partition specified: nope\n")
    error = refused("submit", "--time", "1:00:00", "-p", "nope", "train.py")
    assert "invalid partition specified: nope" in error.found
    assert error.fix.endswith("`--dry-run` shows the job's file")
    assert os.listdir() == ["train.py"]
    Path("runs/train/events").mkdir(parents=True)  # of a run by hand
    refused("submit", "--time", "1:00:00", "-p", "nope", "train.py")
    assert os.listdir("runs/train") == ["events"]


def test_no_cluster_and_no_slurm_are_said_in_plain_words(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every command: a job is not gone because nobody answers."""
    submitted("train.py")
    for said in (
        "error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "error: fetch_config: DNS SRV lookup failed\n"
        "fatal: Could not establish a configuration source\n",
        "error: Unable to contact slurm controller (connect failure)\n",
        "error: Batch job submission failed: Unable to contact Slurm controller\n",
    ):
        for name in ("sbatch", "sinfo", "squeue", "scancel"):
            fakes.set(name, code=1, err=said)
        for command, to_submit in {
            ("submit", "--time", "1:00:00", "--run", "new", "train.py"): True,
            ("sites", "new", "mine"): False,
            ("status", "runs/train"): False,
            ("cancel", "runs/train"): False,
        }.items():
            error = refused(*command)
            assert error.found == "Slurm is installed here but reaches no cluster"
            assert "on a login node" in error.fix
            assert ("--dry-run" in error.fix) == to_submit
    assert sorted(os.listdir()) == ["runs", "train.py"]
    (fakes.path / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(fakes.path))
    assert "there is no sbatch" in refused("submit", "--time", "1:00:00", "train.py").found


@pytest.mark.full
def test_sbatch_may_say_more_than_a_number(fakes: Fakes) -> None:
    fakes.set("sbatch", out="Welcome!\n --> 3 of 100 hours used\n1234;mini\n")
    assert "job 1234:" in submitted("train.py")
    fakes.set("sbatch", out="Submitted, thank you\n")
    error = refused("submit", "--time", "1", "--run", "other", "train.py")
    assert "printed no job number: 'Submitted, thank you'" in error.found


def test_a_run_has_one_job_at_a_time(fakes: Fakes) -> None:
    """The second would take the first one's directory away from it."""
    submitted("train.py")
    fakes.set("squeue", out="42|PENDING|0:00|1:00:00|(Priority)\n")
    error = refused("submit", "--time", "1:00:00", "train.py")
    assert "job 42 (pending) of this run has not ended" in error.found
    assert error.fix.startswith(f"run shoal cancel {Path('runs/train').resolve()} first")
    assert os.listdir("runs/train/jobs") == ["1"]
    submitted("--run", "runs/other", "train.py")
    submitted("--force", "train.py")
    fakes.set("squeue", out="42|COMPLETED|0:07|1:00:00|node01\n")
    submitted("train.py")


@pytest.mark.full
def test_a_job_that_nobody_would_know_of_is_taken_back(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for the record, say: `shoal cancel` would not find it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.tools.submit.submit.write_record", full)
    assert "No space left" in refused("submit", "--time", "1", "train.py").found
    assert fakes.calls("scancel") == [["scancel", "--quiet", "42"]]
    assert os.listdir() == ["train.py"]


@pytest.mark.full
def test_slurm_that_does_not_answer_is_no_job_that_is_gone(fakes: Fakes) -> None:
    submitted("train.py")
    said = "error: Socket timed out on send/recv operation\n"
    for name in ("squeue", "scancel"):
        fakes.set(name, code=1, err=f"slurm_load_jobs {said}")
        for command in ("status", "cancel"):
            if (name, command) != ("scancel", "status"):
                assert "Socket timed out" in refused(command, "runs/train").found
        fakes.set(name)
    fakes.set("squeue", code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    assert "Slurm does not list it any more" in shoal("status", "runs/train").output
    fakes.set("squeue", out="squeue: warning: x\n")
    assert "Slurm does not list it any more" in shoal("status", "runs/train").output


def test_how_a_job_is(fakes: Fakes) -> None:
    submitted("train.py")
    fakes.set("squeue", out="42|RUNNING|1:02|1:00:00|node[01-02]\n")
    (Path("runs/train/jobs/1/ends")).write_text(f"42 0 75 {time.time():.0f}\nhalf a li")
    events = Path("runs/train/events")
    events.mkdir()
    step = {"event": "step", "t": time.time(), "step": 7, "loss": 0.25}
    (events / "rank-0.jsonl").write_text(json.dumps(step) + "\n")
    said = shoal("status", "runs/train").output
    for part in ("running", "node[01-02]", "saved, to be resumed"):
        assert part in said
    assert re.search(r"step 7, loss 0.25, \d+ s ago", said)
    fakes.set("squeue", code=1)
    (Path("runs/train/jobs/1/ends")).write_text(f"42 3 137 {time.time():.0f}\n")
    said = shoal("status", "runs/train").output
    assert "killed by signal 9" in said
    assert "after 3 requeues" in said


@pytest.mark.full
def test_how_a_job_ended_that_never_ran(fakes: Fakes) -> None:
    submitted("train.py")
    fakes.set("squeue", out="42|FAILED|0:00|1:00:00|(JobLaunchFailure)\n")
    for line, told in (("", "JobLaunchFailure"), (f"42 0 3 {time.time():.0f}\n", "failed with 3")):
        Path("runs/train/jobs/1/ends").write_text(line)
        said = shoal("status", "runs/train").output
        assert "failed" in said
        assert told in said
    assert "JobLaunchFailure" not in said


def test_its_log_is_shown(fakes: Fakes, capfd: pytest.CaptureFixture[str]) -> None:
    submitted("train.py")
    error = refused("logs", "runs/train")
    assert "has not started" in error.found
    assert error.fix == "run shoal status runs/train, or shoal logs -f runs/train to wait for it"
    assert "is not an array" in refused("logs", "--element", "0", "runs/train").found
    Path("runs/train/jobs/1/log.txt").write_text("epoch 1\n")
    assert shoal("logs", "runs/train").exit_code == 0
    assert capfd.readouterr().out == "epoch 1\n"


def test_a_log_under_another_name_is_followed_from_before_the_job_starts(
    fakes: Fakes, start_command: Callable[..., Command]
) -> None:
    submitted("--directive=--output=out%j.txt", "train.py")
    assert "#SBATCH --output=out%j.txt\n" in Path("runs/train/jobs/1/job.sh").read_text()
    following = start_command([sys.executable, "-m", "shoal", "logs", "-f", "runs/train"], Path.cwd())
    assert following.process.stderr is not None
    assert "log.txt" in following.process.stderr.readline()  # not there yet
    Path("out42.txt").write_text("epoch 1\n")
    Path("runs/train/jobs/1/log.txt").symlink_to(Path("out42.txt").resolve())
    assert following.process.stdout is not None
    assert following.process.stdout.readline() == "epoch 1\n"
    with Path("out42.txt").open("a") as log:
        log.write("epoch 2\n")
    assert following.process.stdout.readline() == "epoch 2\n"


def test_it_is_cancelled_after_a_save(fakes: Fakes) -> None:
    submitted("train.py")
    fakes.set("squeue", out="42|RUNNING|0:07|1:00:00|node01\n")
    assert "job 42: saves a checkpoint and ends" in shoal("cancel", "runs/train").output
    assert fakes.calls("scancel") == [
        ["scancel", "--quiet", "--state=PENDING", "42"],
        ["scancel", "--quiet", "--signal=USR1", "--state=RUNNING", "42"],
    ]
    assert Path("runs/train/jobs/1/cancelled").exists()
    shoal("cancel", "--now", "runs/train")
    assert fakes.calls("scancel")[-1] == ["scancel", "--quiet", "42"]
    fakes.set("squeue")
    assert "job 42: had ended before" in shoal("cancel", "runs/train").output
    # The newest submission counts.
    fakes.set("sbatch", out="43\n")
    submitted("train.py")
    shoal("cancel", "--now", "runs/train")
    assert fakes.calls("scancel")[-1][-1] == "43"
    Path("runs/train/jobs/2/job.json").write_text('{"jobs": 3}')
    assert "not the record of a job" in refused("status", "runs/train").found


def test_sites_are_listed_shown_and_drafted(fakes: Fakes, tmp_path: Path) -> None:
    listed = shoal("sites", "ls").output
    assert "jean-zay" in listed
    assert "untested" in listed
    assert shoal("sites", "show", "jean-zay").output.startswith("# Jean Zay, of IDRIS")
    fakes.set("sinfo", out="main|infinite|8|gpu:8|4|1:8:1\n")
    fakes.set("scontrol", out="ClusterName = mini\n")
    assert shoal("sites", "new", "mine").exit_code == 0
    assert (tmp_path / "config/shoal/sites/mine.toml").exists()
    assert "mine" in shoal("sites", "ls").output
    assert "there already" in refused("sites", "new", "mine").found
    assert "not the name of a file" in refused("sites", "new", "../mine").found
    submitted("--site", "mine", "--gpus-per-node", "8", "train.py")
    error = refused("submit", "--time=1", "--site=mine", "--gpus-per-node=9", "train.py")
    assert "a node of main has 8 GPUs" in error.found


@pytest.mark.full
def test_a_script_and_a_file_of_a_site_that_can_not_be_read(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_text

    def read_text(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "train.py":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        assert refused("submit", "--time", "1", "--site", "plain", "train.py").given == "train.py"
    odd = tmp_path / "config/shoal/sites/odd.toml"
    odd.mkdir(parents=True)
    error = refused("submit", "--time", "1", "train.py")
    assert error.given == f"the site in {odd}"
    assert "directory" in error.found


def test_words_of_the_list_of_sites_stay_whole(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = shoal("sites", "ls").output
    for columns, files in ((60, False), (99, False), (100, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = shoal("sites", "ls").output
        assert {word for word in narrow.split() if word.strip("─")} <= set(wide.split())
        assert ("jean-zay.toml" in narrow) == files


def test_a_login_node_needs_no_torch(fakes: Fakes) -> None:
    probe = """
import sys
from shoal.cli.main import main
try:
    main()
finally:
    print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, "submit", "--time", "1:00:00", "train.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "job 42" in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_a_job_is_submitted_from_within_another(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers of nodes and tasks are not the new one's."""
    (fakes.path / "sbatch").write_text("#!/bin/bash\nenv > variables\necho 43\n")
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "7")
    submitted("train.py")
    seen = Path("variables").read_text().splitlines()
    names = {line.partition("=")[0] for line in seen}
    kept = {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert names & {"SLURM_JOB_ID", "SLURM_NTASKS", *kept} == kept


PARTITIONS = """\
PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 State=UP
PartitionName=debug Default=NO MaxNodes=2 MaxTime=01:00:00 State=UP
PartitionName=any Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
"""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--time=2-01"], "the default queue ends jobs after 48:00:00"),
        (["--time=2:00:00", "-p", "debug"], "the queue debug ends jobs after 01:00:00"),
        (["--time=1:00:00", "--nodes=3", "-p", "debug"], "a job in the queue debug has at most 2"),
        (["--time=3-00", "-p", "debug,main"], "the queue debug,main ends jobs after 48:00:00"),
        (["--time=30-00", "-p", "any"], ""),
        (["--time=30-00", "-p", "debug", "--directive=--partition=any"], ""),
        (["--time=30-00", "-p", "debug", "--force"], ""),
        (["--time=30-00", "-p", "unlisted"], ""),  # sbatch rejects it
    ],
)
def test_more_than_a_partition_allows_is_refused(
    arguments: list[str], found: str, fakes: Fakes
) -> None:
    """By default Slurm accepts such a job, and never starts it."""
    fakes.set("scontrol", out=PARTITIONS)
    if found:
        assert found in refused("submit", *arguments, "train.py").found
    else:
        assert "job 42" in shoal("submit", *arguments, "train.py").output
    assert len(fakes.calls("sbatch")) == (0 if found else 1)
    assert Path("runs").exists() == (not found)
