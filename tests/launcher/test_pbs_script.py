"""PBS without its daemons: the batch script is run, its commands answer as others have recorded."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest

from helpers import pbs_recordings as recorded
from helpers.cli import fake_slurm, refused, shoal
from helpers.fake_slurm import PLAIN, Fakes, place, request, run_script, write
from shoal.tools.submit import schedulers
from shoal.tools.submit.pbs.scheduler import PBS
from shoal.tools.submit.pbs.text_output import draft_text, parse_queue, queue_limits
from shoal.tools.submit.site_catalog import Partition, Site, read_site
from shoal.util.errors import LaunchError

COMMANDS = ("qsub", "qstat", "qdel", "qsig", "pbsnodes", "pbs_tmrsh", "mpirun", "sleep")
SITE = Site(name="lab", scheduler="pbs", partitions={"gpu": Partition(name="gpu", option="gpuq")})
PALS = ("mpiexec", "--ppn", "{per_node}", "--depth", "{cpus}", "--hostfile", "$PBS_NODEFILE")
EVERYTHING = request(
    nodes=2,
    gpus=4,
    cpus=8,
    memory="64gb",
    partition="gpu",
    sweep=(("--lr", "0.1"), ("--lr", "0.2")),
    at_once=1,
    constraint="gputype=A100",
    account="abc",
    stage=("data",),
    options=("-l filesystems=home:eagle",),
)


def own_lines() -> list[str]:
    """The lines of a batch script that the one for Slurm has not."""
    where = place("/scratch/me", stage=("/scratch/me/data",), sweep=EVERYTHING.sweep)
    slurm = write(
        request(nodes=2, processes=8, launcher="mpirun", sweep=EVERYTHING.sweep), PLAIN, where
    )
    site = Site(**{**vars(SITE), "mpirun": PALS})
    lines = write(EVERYTHING, site, where).splitlines()
    return [line for line in lines if line and line not in slurm.splitlines()]


def test_each_line_for_pbs_has_a_source(repository: Path) -> None:
    text = (repository / "tests/launcher/golden/pbs.txt").read_text()
    known = [line.rpartition(" | ")[0].rstrip() for line in text.splitlines()]
    assert known == own_lines()


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "jobs/1").mkdir(parents=True)
    (tmp_path / "nodes").write_text("node01\nnode01\nnode02\nnode02\n")
    found = Fakes(tmp_path / "fakes", COMMANDS)
    found.set("qsub", out="8.pbs\n")
    (found.path / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.01\n")
    return found


def end(
    fakes: Fakes,
    tmp_path: Path,
    launcher: str | None = None,
    *,
    site: Site = SITE,
    shell: str = "",
    **changes: object,
) -> tuple[int, str]:
    """Run the batch script of a job whose mpirun is the bash text `launcher`: exit code, log."""
    if launcher is not None:
        (fakes.path / "mpirun").write_text(f"#!/bin/bash\n{launcher}\n")
    asked = request(nodes=2, processes=4, **changes)
    variables = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}
    variables |= {"BASH_ENV": shell}
    if asked.sweep:
        variables |= {"PBS_JOBID": "7[1].pbs", "PBS_ARRAY_INDEX": "1"}
    where = place(tmp_path, sweep=asked.sweep, stage=asked.stage)
    with (tmp_path / "spool").open("a") as spool:
        done = run_script(write(asked, site, where), fakes, variables, stdout=spool)
    assert (done.stderr, (tmp_path / "spool").read_text()) == ("", "")
    return done.returncode, (tmp_path / f"jobs/1/log{'-1' * bool(asked.sweep)}.txt").read_text()


def test_a_job_that_finishes_is_not_continued(fakes: Fakes, tmp_path: Path) -> None:
    code, log = end(fakes, tmp_path, 'echo "start $RESTARTED: $1 $2"')
    assert (code, log) == (0, "start 0: -n 4\n")
    assert fakes.calls("qsub") == []
    [line] = (tmp_path / "jobs/1/ends").read_text().splitlines()
    assert line.split()[:3] == ["7.pbs", "0", "0"]


def test_a_new_job_continues_one_that_has_saved(fakes: Fakes, tmp_path: Path) -> None:
    """Only operators may use qrerun."""
    (tmp_path / "jobs/1/job.sh").touch()
    code, log = end(fakes, tmp_path, "exit 75")
    assert (code, "7.pbs has saved and is requeued" in log) == (75, True)
    assert fakes.calls("qsub") == [["qsub", str(tmp_path / "jobs/1/job.sh")]]
    assert (tmp_path / "jobs/1/jobs").read_text() == "8.pbs\n"
    code, log = end(fakes, tmp_path, "exit 0")
    assert [line.split()[1] for line in (tmp_path / "jobs/1/ends").read_text().splitlines()] == [
        "0",
        "1",
    ]


def test_what_users_may_not_submit_from_a_node_is_said(fakes: Fakes, tmp_path: Path) -> None:
    fakes.set("qsub", code=1, err="qsub: Unauthorized Request\n")
    code, log = end(fakes, tmp_path, "exit 75")
    assert code == 75
    assert "qsub: Unauthorized Request\nshoal: requeueing failed; submit it again to resume" in log
    # A site where that is so: a chain of jobs.
    _, log = end(fakes, tmp_path, "exit 75", site=Site(name="lab", scheduler="pbs", requeue=False))
    assert "has saved; submit it again to resume" in log
    assert len(fakes.calls("qsub")) == 1


TOLD = "trap 'echo told; exit 75' USR1; while :; do /bin/sleep 0.01; done"


def test_the_script_tells_the_ranks_before_the_time_limit(fakes: Fakes, tmp_path: Path) -> None:
    code, log = end(fakes, tmp_path, TOLD, time=5)
    assert (code, "told\n" in log, "is requeued" in log) == (75, True, True)
    assert len(fakes.calls("qsub")) == 1


# In a shell that keeps the time, SIGTERM comes after a sleep and before the next one.
BETWEEN = """
[() {
    if builtin [ "$2" = -lt ]; then touch looks; until builtin [ -e told ]; do /bin/sleep 0.01; done; fi
    builtin [ "$@"
}
kill() { builtin kill "$@"; touch told; }
"""


def test_the_timer_ends_with_the_launcher(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "between").write_text(BETWEEN)
    waits = "until [ -e looks ]; do /bin/sleep 0.01; done"
    assert end(fakes, tmp_path, waits, shell=str(tmp_path / "between")) == (0, "")


def test_cancel_is_a_mark_that_the_script_looks_for(fakes: Fakes, tmp_path: Path) -> None:
    mark = tmp_path / "jobs/1/cancelled"
    code, log = end(fakes, tmp_path, f"{TOLD.replace('while', f'touch {mark}; while')}")
    assert (code, "told\n" in log, "7.pbs has saved and is cancelled" in log) == (75, True, True)
    assert fakes.calls("qsub") == []
    code, log = end(fakes, tmp_path, "echo started")
    assert "7.pbs does not start: it was cancelled" in log


@pytest.mark.parametrize(("limit", "requeues"), [(3600, 0), (1, 1)])
def test_sigterm_is_qdel_a_preemption_or_the_limit(
    limit: int, requeues: int, fakes: Fakes, tmp_path: Path
) -> None:
    """PBS sends it to all processes; a job that it preempts it starts again itself."""
    ended = "trap 'exit 75' TERM; kill -TERM $PPID; /bin/sleep 0.2; kill -TERM $$; wait"
    site = Site(name="lab", scheduler="pbs", lead=5)
    (fakes.path / "sleep").unlink()  # the script's own signal comes late
    code, log = end(fakes, tmp_path, ended, site=site, time=limit)
    assert (code, len(fakes.calls("qsub"))) == (75, requeues), log


def test_a_failure_has_a_report(fakes: Fakes, tmp_path: Path) -> None:
    failing = (
        "printf 'Traceback (most recent call last):\\nValueError: no\\n' >&2\n"
        "echo 'x3006c0s13b1n0.hsn: rank 3 exited with code 3'; exit 3"
    )
    code, log = end(fakes, tmp_path, failing)
    assert code == 3
    *_, reason, where = log.splitlines()
    assert reason == "ValueError: no"
    assert where == "where: 7.pbs on node01 node02, exit code 3; no rank has written a report"
    assert "shoal: 7.pbs failed:" in log
    code, log = end(fakes, tmp_path, failing, restarts=1)
    assert (code, len(fakes.calls("qsub"))) == (3, 1)


def test_one_element_of_an_array_continues_alone(fakes: Fakes, tmp_path: Path) -> None:
    """`-J 1-2:2` is element 1: PBS has no array from 1 to 1."""
    (tmp_path / "jobs/1/job.sh").touch()
    fakes.set("qsub", out="8[].pbs\n")
    code, log = end(fakes, tmp_path, 'echo "${@: -1}"; exit 75', sweep=(("a",), ("b",)))
    assert (code, log.splitlines()[0]) == (75, "b")
    assert fakes.calls("qsub") == [["qsub", "-J", "1-2:2", str(tmp_path / "jobs/1/job.sh")]]
    assert (tmp_path / "jobs/1/ends").read_text().split()[0] == "7[1].pbs"


def test_each_node_copies_the_staged_files(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("content")
    # What is /tmp/shoal-7 on each node is shoal-7 and other-7 here.
    (fakes.path / "pbs_tmrsh").write_text(
        '#!/bin/bash\n[ "$1" = node01 ] || set -- "${@//shoal-7/other-7}"\nshift\nexec "$@"\n'
    )
    site = Site(name="lab", scheduler="pbs", local=str(tmp_path))
    shown = f"cat {tmp_path}/*-7.pbs/data/file"
    code, log = end(fakes, tmp_path, shown, site=site, stage=(str(tmp_path / "data"),))
    assert code == 0, log
    assert log.endswith("contentcontent")
    assert not list(tmp_path.glob("*-7.pbs"))
    assert not list((tmp_path / "jobs/1").glob("staged*"))


@pytest.mark.parametrize(
    ("changes", "folder", "found"),
    [
        ({}, "/scratch/my runs", ""),
        ({}, "/scratch/it's", "qsub gives a meaning to quotes"),
        ({}, "/scratch/a,b", "qsub gives a meaning to quotes"),
        ({}, "/scratch/a:b", "qsub gives a meaning to quotes"),
        ({"name": "a b"}, "/scratch", "columns of qstat"),
        ({"memory": "lots"}, "/scratch", "PBS would reject this value"),
        ({"constraint": "a b"}, "/scratch", "PBS would reject this value"),
        ({"qos": "long"}, "/scratch", "PBS has no such option"),
        ({"options": ("--exclusive",)}, "/scratch", "it is not an option of qsub"),
        ({"launcher": "srun"}, "/scratch", "--launcher is one of mpirun"),
    ],
)
def test_what_qsub_reads_differently_is_refused(
    changes: dict[str, object], folder: str, found: str
) -> None:
    if not found:
        assert '#PBS -o "/scratch/my runs/jobs/1/"\n' in write(request(), SITE, place(folder))
        return
    with pytest.raises(LaunchError, match=found):
        write(request(**changes), SITE, place(folder))


def test_an_array_of_one_element_has_a_step() -> None:
    text = write(request(sweep=(("a",),)), SITE, place("/scratch", sweep=(("a",),)))
    assert "#PBS -J 0-1:2\n" in text


def test_the_states_of_jobs() -> None:
    assert list(parse_queue("")) == []
    waits, held, runs = parse_queue(recorded.JOBS)
    assert (waits.job, waits.phase, waits.limit) == ("7013474.pbs1.example.org", "waiting", "72:00:00")
    assert waits.reason == "Not Running: Insufficient amount of resource: ncpus"
    assert (waits.never_starts, held.never_starts[:22]) == ("", "PBS could not start it")
    assert (runs.phase, runs.state, runs.ran) == ("running", "R", "00:00:10")
    assert runs.reason == "execute-2/0"
    elements = list(parse_queue(recorded.ARRAY))
    assert [(each.job, each.phase) for each in elements] == [
        ("7[0].pbs", "ended"),
        ("7[1].pbs", "running"),
        ("7[2].pbs", "waiting"),
    ]
    assert "no such resources" in elements[2].never_starts
    assert elements[2].reason.endswith("(R: 2 A: 1 T: 1)")


def test_output_that_breaks_off_or_is_of_others() -> None:
    """A job without a state has not ended, and what is no number is no limit."""
    cut = recorded.JOBS[: recorded.JOBS.index("    job_state = R")]
    *_, job = parse_queue(f"Warning:\n{cut}")
    assert (job.job, job.phase, job.state) == ("4.pbs1.example.org", "waiting", "?")
    assert [each.phase for each in parse_queue("Job Id: 7.pbs\n")] == ["waiting"]
    assert queue_limits({"resources_max.walltime": "none", "resources_max.nodect": "8 (all)"}) == (
        math.inf,
        math.inf,
    )
    nodes = "Warning\n\nnode01\n     resources_available.ncpus = many\n"
    text = draft_text("lab", "Queue: a\n    enabled = True\n\nQueue: b\n    queue_type", nodes)
    assert "nodes = 1\ngpus = 0\ncores = 0" in text
    assert '[partitions."b"]' not in text


def test_a_site_is_drafted() -> None:
    text = draft_text("lab", recorded.QUEUES, recorded.NODES)
    site = read_site("lab", text, "lab.toml")
    assert (site.scheduler, list(site.partitions)) == ("pbs", ["debug", "workq"])
    first, second = site.partitions.values()
    assert (first.nodes, first.cores, first.gpus, first.cpus_per_gpu) == (1, 64, 4, 16)
    assert (first.time, second.time, second.nodes) == (3600, None, 2)
    with pytest.raises(LaunchError, match="no queue that accepts jobs"):
        draft_text("lab", "", recorded.NODES)


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Return the commands of PBS, with a site."""
    sites = {"lab": 'scheduler = "pbs"\n'}
    return fake_slurm(tmp_path, monkeypatch, submitted="7.pbs-01\n", sites=sites, commands=COMMANDS)


SUBMIT = ("submit", "--site", "lab", "--time", "1:00:00")


def submit(*arguments: str) -> str:
    done = shoal(*SUBMIT, *arguments, "train.py")
    assert done.exit_code == 0, done.exception
    return done.output


def test_a_job_is_submitted_followed_and_cancelled(pbs: Fakes) -> None:
    assert "job 7.pbs-01: 2 nodes, 2 processes" in submit("--nodes", "2")
    script = Path("runs/train/jobs/1/job.sh").resolve()
    assert pbs.calls("qsub") == [["qsub", str(script)]]
    subprocess.run(["bash", "-n", str(script)], check=True)
    pbs.set("qstat", out=recorded.JOBS)
    status = shoal("status", "runs/train").output
    assert "can never start: PBS could not start it; submit it again (job held" in status
    assert "of this run has not ended" in refused(*SUBMIT, "train.py").found
    assert "saves a checkpoint and ends" in shoal("cancel", "runs/train").output
    assert os.path.exists("runs/train/jobs/1/cancelled")
    assert pbs.calls("qdel") == [["qdel", "7013474.pbs1.example.org", "412020.pbs1.example.org"]]
    assert "cancelled" in shoal("cancel", "--now", "runs/train").output
    assert pbs.calls("qdel")[1:] == [["qdel", "7.pbs-01"]]
    assert pbs.calls("qsig") == []
    for gone in (recorded.GONE, recorded.FINISHED):
        pbs.set("qstat", err=gone, code=35)
        assert "PBS does not list it any more" in shoal("status", "runs/train").output


def test_a_chain_and_an_array(pbs: Fakes) -> None:
    submit("--run", "a", "--chain", "2")
    assert pbs.calls("qsub")[1][1:3] == ["-W", "depend=afterany:7.pbs-01"]
    Path("sweep").write_text("--lr 1\n--lr 2\n")
    pbs.set("qsub", out="welcome\n8[].pbs-01\n")
    assert "job 8[].pbs-01" in submit("--run", "b", "--sweep", "sweep")


@pytest.mark.parametrize(
    ("command", "answer", "arguments", "found"),
    [
        ("qstat", recorded.UNKNOWN_QUEUE, ["-p", "nowhere"], "Unknown queue nowhere"),
        ("qstat", "", ["-p", "debug", "--time=2:00:00"], "the queue debug ends jobs after 01:00:00"),
        ("qstat", "", ["-p", "debug", "--nodes=5"], "a job in the queue debug has at most 2"),
        ("qsub", recorded.TOO_MUCH, ["-p", "workq"], "violates queue and/or server resource limits"),
        ("qstat", recorded.UNREACHED, ["-p", "debug"], "PBS is installed here but reaches no cluster"),
        ("qsub", "welcome\n", [], "printed no job number"),
    ],
)
def test_what_can_never_run_is_refused(
    command: str, answer: str, arguments: list[str], found: str, pbs: Fakes
) -> None:
    pbs.set("qstat", out=recorded.QUEUES.partition("Queue: workq")[0])
    if command == "qsub":
        pbs.set("qstat")
    if answer:
        pbs.set(command, err=answer, code=0 if "welcome" in answer else 1)
    error = refused(*SUBMIT, *arguments, "train.py")
    assert found in error.found
    assert error.fix
    assert not Path("runs").exists()


@pytest.mark.parametrize("word", ["{nodes}", "{per_node[0]}", "{cpus:9}", "{}", "{{a}}", "${HOME}"])
def test_bad_words_of_a_site_are_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="mpirun"):
        read_site("lab", f'mpirun = ["mpiexec", "--ppn", "{word}"]', "lab.toml")
    with pytest.raises(LaunchError, match="Shoal supports"):
        read_site("lab", 'scheduler = "torque"', "lab.toml")


def test_a_site_is_drafted_where_pbs_is_installed(pbs: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "SCHEDULERS", {"pbs": PBS()})
    pbs.set("qstat", out=recorded.QUEUES)
    pbs.set("pbsnodes", out=recorded.NODES)
    assert shoal("sites", "new", "drafted").exit_code == 0
    assert '[partitions."workq"]' in shoal("sites", "show", "drafted").output
