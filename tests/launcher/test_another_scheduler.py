"""A second scheduler behind the contract: the modules above it name no command of Slurm."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers.fake_slurm import Fakes, place, run_script, write
from helpers.stub_scheduler import COMMANDS, SITE, Pool
from shoal.cli.main import app
from shoal.launcher.submit.job import JobRequest
from shoal.launcher.submit.schedulers import SCHEDULERS
from shoal.launcher.submit.site import Site
from shoal.util.errors import LaunchError

ABOVE = ("launcher/submit/*.py", "launcher/submit/*.jinja", "cli/submit*.py", "bench/scaling/**/*.py")
SLURM = re.compile(r"\bs(batch|queue|control|acct|cancel|info|bcast|run)\b|SLURM")


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Return the commands of Pool, the only scheduler besides Slurm, with a site and a script."""
    fakes = Fakes(tmp_path / "fakes", COMMANDS)
    for name, value in fakes.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setitem(SCHEDULERS, "pool", Pool())
    sites = tmp_path / "config/shoal/sites"
    sites.mkdir(parents=True)
    (sites / "lab.toml").write_text(SITE)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path / "work")
    fakes.set("pool-submit", out="pool:7\n")
    return fakes


def shoal(*arguments: str) -> str:
    done = run_shoal(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def run_shoal(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


SUBMIT = ("submit", "--site", "lab", "--time", "1:00:00", "--nodes", "2")


def test_a_job_is_submitted_in_the_words_of_its_scheduler(pool: Fakes) -> None:
    assert "job pool:7: 2 nodes, 2 process(es), 01:00:00" in shoal(*SUBMIT, "train.py")
    script = Path("runs/train/jobs/1/job.sh").resolve()
    assert pool.calls() == [["pool-submit", str(script)]]
    text = script.read_text()
    assert "#POOL hosts=2 cores=None minutes=60\n#POOL warn=USR1:300 log=" in text
    assert 'pool-run --ranks 2 "${program[@]}"' in text
    assert SLURM.search(text) is None


def test_a_chain_a_script_alone_and_a_directive(pool: Fakes) -> None:
    shoal(*SUBMIT, "--chain", "2", "--directive", "quiet=yes", "train.py")
    assert pool.calls("pool-submit")[1][1:3] == ["--after", "pool:7"]
    assert "#POOL quiet=yes\n" in Path("runs/train/jobs/1/job.sh").read_text()
    assert "not submitted: pool-submit mine.sh" in shoal(*SUBMIT, "-o", "mine.sh", "train.py")


def test_status_cancel_and_a_second_submission(pool: Fakes) -> None:
    shoal(*SUBMIT, "train.py")
    assert "Pool does not list it any more" in shoal("status", "runs/train")
    pool.set("pool-list", out="pool:7 parked\n")
    assert "job pool:7 can never start: it is parked for good" in shoal("status", "runs/train")
    error = run_shoal(*SUBMIT, "train.py").exception
    assert isinstance(error, LaunchError)
    assert "job pool:7 (parked) of this run has not ended" in error.found
    assert "job pool:7: saves a checkpoint and ends" in shoal("cancel", "runs/train")
    assert "job pool:7: cancelled" in shoal("cancel", "--now", "runs/train")
    kills = pool.calls("pool-kill")
    assert kills == [["pool-kill", "--gently", "USR1", "pool:7"], ["pool-kill", "pool:7"]]


def test_what_the_scheduler_does_not_have_is_an_error(pool: Fakes) -> None:
    error = run_shoal(*SUBMIT, "--launcher", "srun", "train.py").exception
    assert isinstance(error, LaunchError)
    assert "the launchers are pool-run, mpirun" in error.found
    pool.set("pool-submit", code=1, err="no more today\n")
    error = run_shoal(*SUBMIT, "train.py").exception
    assert isinstance(error, LaunchError)
    assert (error.found, Path("runs").exists()) == ("no more today", False)


def test_a_site_is_drafted_by_the_scheduler_that_is_installed(
    pool: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SCHEDULERS, "slurm")
    pool.set("pool-info", out="Pool 3, blue\n")
    shoal("sites", "new", "drafted")
    assert 'about = "Pool 3, blue"\nscheduler = "pool"\n' in shoal("sites", "show", "drafted")


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (75, 1), (3, 0)])
def test_the_batch_script_ends_and_requeues_by_its_commands(
    code: int, requeues: int, pool: Fakes, tmp_path: Path
) -> None:
    (tmp_path / "jobs/1").mkdir(parents=True)
    request = JobRequest(script="train.py", time=600)
    text = write(request, Site(name="lab", scheduler="pool"), place(tmp_path))
    pool.set("pool-run", code=code)
    pool.set("pool-list", out="pool:7 active\n")
    done = run_script(text, pool, {"POOL_ID": "pool:7", "POOL_HOSTS": "a b"})
    assert done.returncode == code, done.stderr
    assert pool.calls("pool-again") == [["pool-again", "pool:7"]] * requeues
    [job, restarts, ended, when] = (tmp_path / "jobs/1/ends").read_text().split()
    assert (job, restarts, ended, float(when) <= time.time()) == ("pool:7", "0", str(code), True)
    assert ("where: pool:7 on a b, exit code 3" in done.stderr) == (code == 3)


def test_a_scaling_study_is_submitted(pool: Fakes) -> None:
    study = ("bench", "scaling", "dense", "-n", "1,2", "--rounds", "1", "--study", "s")
    assert "job pool:7: 1 node, 2 training(s)" in shoal(*study, "--submit", "--site", "lab")
    script = Path("s/submitted/nodes-1/jobs/1/job.sh").read_text()
    assert "pool-run --ranks 1 --part bash -c" in script
    pool.set("pool-list", out="pool:7 parked\n")
    waiting = run_shoal("bench", "collect", "s").output
    assert "job pool:7: 2 parked: shoal status s/submitted/nodes-1" in waiting


def test_only_the_package_of_slurm_names_its_commands(repository: Path) -> None:
    package = repository / "src/shoal"
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for pattern in ABOVE
        for path in sorted(package.glob(pattern))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SLURM.search(line)
    ]
    assert found == []
    assert SLURM.search((package / "launcher/submit/slurm/scheduler.py").read_text())
