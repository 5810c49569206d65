"""A made-up scheduler behind the contract: the modules above it name no command of a scheduler."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from helpers.cli import fake_slurm, refused, shoal
from helpers.fake_slurm import Fakes, place, request, run_script, write
from helpers.stub_scheduler import COMMANDS, SITE, Pool
from shoal.tools.submit import schedulers
from shoal.tools.submit.schedulers import SCHEDULERS
from shoal.tools.submit.site_catalog import Site

ABOVE = ("tools/submit/*.py", "tools/submit/*.jinja", "cli/submit*.py", "tools/bench/scaling/**/*.py")
OF_SCHEDULERS = re.compile(
    r"\bs(batch|queue|control|acct|cancel|info|bcast|run)\b|\bq(sub|stat|del|conf|mod|rsh)\b|SLURM|SGE_|\bkubectl\b"
)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Return the commands of Pool, a scheduler besides those of Shoal, with a site and a script."""
    monkeypatch.setitem(SCHEDULERS, "pool", Pool())
    return fake_slurm(
        tmp_path, monkeypatch, submitted="pool:7\n", sites={"lab": SITE}, commands=COMMANDS
    )


def done(*arguments: str) -> str:
    found = shoal(*arguments)
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


SUBMIT = ("submit", "--site", "lab", "--time", "1:00:00", "--nodes", "2")


def test_a_job_is_submitted_in_the_words_of_its_scheduler(pool: Fakes) -> None:
    assert "job pool:7: 2 nodes, 2 processes, 01:00:00" in done(*SUBMIT, "train.py")
    script = Path("runs/train/jobs/1/job.sh").resolve()
    assert pool.calls() == [["pool-submit", str(script)]]
    text = script.read_text()
    assert "#POOL hosts=2 cores=None minutes=60\n#POOL warn=USR1:300 log=" in text
    assert 'pool-run --ranks 2 "${program[@]}"' in text
    assert OF_SCHEDULERS.search(text) is None
    done(*SUBMIT, "--run", "b", "--chain", "2", "--directive", "quiet=yes", "train.py")
    assert pool.calls("pool-submit")[2][1:3] == ["--after", "pool:7"]
    assert "#POOL quiet=yes\n" in Path("b/jobs/1/job.sh").read_text()
    assert "not submitted: pool-submit mine.sh" in done(*SUBMIT, "-o", "mine.sh", "train.py")


def test_status_cancel_and_a_second_submission(pool: Fakes) -> None:
    done(*SUBMIT, "train.py")
    assert "Pool does not list it any more" in done("status", "runs/train")
    pool.set("pool-list", out="pool:7 parked\n")
    assert "job pool:7 can never start: it is parked for good" in done("status", "runs/train")
    error = refused(*SUBMIT, "train.py")
    assert "job pool:7 (parked) of this run has not ended" in error.found
    assert "job pool:7: saves a checkpoint and ends" in done("cancel", "runs/train")
    assert "job pool:7: cancelled" in done("cancel", "--now", "runs/train")
    kills = pool.calls("pool-kill")
    assert kills == [["pool-kill", "--gently", "USR1", "pool:7"], ["pool-kill", "pool:7"]]


def test_what_the_scheduler_does_not_have_is_an_error(pool: Fakes) -> None:
    error = refused(*SUBMIT, "--launcher", "srun", "train.py")
    assert "--launcher is one of pool-run, mpirun" in error.found
    pool.set("pool-submit", code=1, err="no more today\n")
    error = refused(*SUBMIT, "train.py")
    assert (error.found, Path("runs").exists()) == ("no more today", False)


def test_a_site_is_drafted_by_the_scheduler_that_is_installed(
    pool: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "SCHEDULERS", {"pool": Pool()})
    pool.set("pool-info", out="Pool 3, blue\n")
    done("sites", "new", "drafted")
    assert 'about = "Pool 3, blue"\nscheduler = "pool"\n' in done("sites", "show", "drafted")


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (75, 1), (3, 0)])
def test_the_batch_script_ends_and_requeues_by_its_commands(
    code: int, requeues: int, pool: Fakes, tmp_path: Path
) -> None:
    (tmp_path / "jobs/1").mkdir(parents=True)
    text = write(request(), Site(name="lab", scheduler="pool"), place(tmp_path))
    pool.set("pool-run", code=code)
    pool.set("pool-list", out="pool:7 active\n")
    ended = run_script(text, pool, {"POOL_ID": "pool:7", "POOL_HOSTS": "a b"})
    assert ended.returncode == code, ended.stderr
    assert pool.calls("pool-again") == [["pool-again", "pool:7"]] * requeues
    [job, restarts, said, when] = (tmp_path / "jobs/1/ends").read_text().split()
    assert (job, restarts, said, float(when) <= time.time()) == ("pool:7", "0", str(code), True)
    assert ("where: pool:7 on a b, exit code 3" in ended.stderr) == (code == 3)


def test_a_scaling_study_is_submitted(pool: Fakes) -> None:
    study = ("bench", "scaling", "dense", "-n", "1,2", "--rounds", "1", "--study", "s")
    assert "job pool:7: 1 node, 2 training(s)" in done(*study, "--submit", "--site", "lab")
    script = Path("s/submitted/nodes-1/jobs/1/job.sh").read_text()
    assert "pool-run --ranks 1 --part bash -c" in script
    pool.set("pool-list", out="pool:7 parked\n")
    waiting = shoal("bench", "collect", "s").output
    assert "job pool:7: 2 parked: shoal status s/submitted/nodes-1" in waiting


def test_only_the_packages_of_schedulers_name_their_commands(repository: Path) -> None:
    package = repository / "src/shoal"
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for pattern in ABOVE
        for path in sorted(package.glob(pattern))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OF_SCHEDULERS.search(line)
    ]
    assert found == []
    assert OF_SCHEDULERS.search((package / "tools/submit/slurm/scheduler.py").read_text())
