"""The batch script: what stands in it, and what it does under commands that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_slurm import PLAIN, Fakes, place, request, run_script, write
from shoal.telemetry.events import path_of
from shoal.tools.submit.site_catalog import Site, find_entry, load
from shoal.util.errors import LaunchError

HOSTILE = (
    "$(touch broken)",
    "`touch broken`",
    "; touch broken #",
    "' ; touch broken ; '",
    '" ; touch broken ; "',
    "two\nlines\n#SBATCH --nodes=9",
    "far\n\n\n\napart'\n",
    "$HOME",
    "*",
    "",
    "-x",
    "back\\slash",
    "é ü 漢",
    "!history",
    "%j",
)


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "run/jobs/1").mkdir(parents=True)
    return Fakes(tmp_path / "fakes")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


VARIANTS = {
    "one process": request(),
    "uneven": request(nodes=3, processes=5),
    "array": request(sweep=(("--lr", "0.1"), ("--lr", "0.2")), at_once=1),
    "chain": request(chain=3),
    "chain of arrays": request(chain=3, sweep=(("a",), ("b",))),
    "torchrun": request(launcher="torchrun", nodes=2, gpus=2, cpus=3),
    "mpirun": request(launcher="mpirun", processes=3),
    "container": request(container="image.sif"),
    "options": request(memory="4G", account="a", qos="q", constraint="a&b", options=("--exclusive",)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("site", ["plain", "jean-zay"])
def test_bash_reads_it(variant: str, site: str, tmp_path: Path) -> None:
    text = write(VARIANTS[variant], load(find_entry(site)), place(tmp_path, sweep=(("a b",), ("c",))))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--severity=warning", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_whatever_was_typed_arrives_as_it_was(fakes: Fakes, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $(touch broken)\na "run"'
    (folder / "jobs/1").mkdir(parents=True)
    where = place(folder, args=HOSTILE)
    with pytest.raises(LaunchError, match="control character"):
        write(request(), PLAIN, where)  # in the path of the log, which sbatch reads
    folder = tmp_path / 'it\'s $(touch broken) a "run" of 50 %'
    (folder / "jobs/1").mkdir(parents=True)
    where = place(folder, args=HOSTILE, python="/a python/$(touch broken)")
    done = run_script(write(request(cpus=3), PLAIN, where), fakes)
    assert (done.returncode, done.stderr) == (0, "")
    [call] = fakes.calls("srun")
    script = f"{folder}/jobs/1/source/train.py"
    assert ranks(call) == ["/a python/$(touch broken)", script, *HOSTILE]
    assert not list(tmp_path.rglob("broken"))


def test_no_value_ends_a_line_that_sbatch_reads_or_is_another_option(tmp_path: Path) -> None:
    for field in ("name", "account", "partition", "qos", "constraint", "memory"):
        for value in ("a\n#SBATCH --nodes=9", "a\rb", "\x1b[2J", "a\\b"):
            with pytest.raises(LaunchError, match=r"control character, or a back|Slurm would reject"):
                write(request(**{field: value}), PLAIN, place(tmp_path))
    for changes in ({"memory": "lots"}, {"memory": "1.5G"}, {"constraint": "a b"}):
        with pytest.raises(LaunchError, match="Slurm would reject this value"):
            write(request(**changes), PLAIN, place(tmp_path))
    for option in ("exclusive", "-w n1", "--a b", "--exclude=n1\n", "; rm"):
        with pytest.raises(LaunchError):
            write(request(options=(option,)), PLAIN, place(tmp_path))


def test_a_directive_replaces_the_line_of_the_same_option(tmp_path: Path) -> None:
    lines = directives(write(request(), PLAIN, place(tmp_path)))
    own = ("--output=out%j.txt", "--exclude=node07", "--requeue")
    changed = directives(write(request(options=own), PLAIN, place(tmp_path)))
    log = next(line for line in lines if line.startswith("--output"))
    assert changed == [own[0] if line == log else line for line in lines] + [own[1]]


def test_the_log_may_have_another_name(fakes: Fakes, tmp_path: Path) -> None:
    """The batch script finds the file, in which an attempt before has left lines, and links to it."""
    (tmp_path / "run/jobs/1/log.txt").symlink_to("of an attempt before")
    out = tmp_path / "out 42.txt"
    out.write_text("ValueError: old\n")
    fakes.set("srun", code=3, out="Traceback\nValueError: new\n")
    text = write(request(), PLAIN, place(tmp_path / "run"))
    for _ in range(2):
        with out.open("a") as log:
            run_script(text, fakes, stdout=log)
        assert (tmp_path / "run/jobs/1/log.txt").readlink() == out
        first, second, _ = (tmp_path / "run/jobs/1/failure").read_text().splitlines()
        assert (first, second) == ("Traceback", "ValueError: new")


def ranks(call: list[str]) -> list[str]:
    """The command of each rank, without what stands around it."""
    return call[call.index("-c") + 3 :]


def test_the_shape_of_a_job(tmp_path: Path) -> None:
    nodes, tasks = "--nodes=4", "--ntasks-per-node"
    for changes, expected in (
        ({"processes": 2}, ["--nodes=1", f"{tasks}=2"]),
        ({"nodes": 2, "processes": 4}, ["--nodes=2", f"{tasks}=2"]),
        ({"nodes": 3, "processes": 5}, ["--nodes=3", "--ntasks=5", f"{tasks}=2"]),
        ({"nodes": 4, "gpus": 3}, [nodes, f"{tasks}=3", "--gres=gpu:3"]),
        ({"nodes": 4, "gpus": 3, "launcher": "torchrun"}, [nodes, f"{tasks}=1", "--gres=gpu:3"]),
    ):
        lines = directives(write(request(**changes), PLAIN, place(tmp_path)))
        shape = ("--nodes", "--ntasks", tasks, "--gres")
        assert [line for line in lines if line.split("=")[0] in shape] == expected


def finish(
    fakes: Fakes,
    folder: Path,
    code: int,
    state: str = "RUNNING Reason=None",
    **changes: object,
) -> tuple[int, list[list[str]]]:
    """Run a job whose ranks end with a code; its own code, and what it asked of Slurm."""
    variables = {name: str(changes.pop(name)) for name in list(changes) if name.isupper()}
    site = PLAIN if changes.pop("requeue", True) else Site(name="plain", requeue=False)
    fakes.set("srun", code=code)
    fakes.set("scontrol", out=f"JobId=42 JobName=x JobState={state} Dependency=(null)\n")
    sweep = changes.get("sweep", ())
    done = run_script(write(request(**changes), site, place(folder, sweep=sweep)), fakes, variables)
    return done.returncode, [call for call in fakes.calls() if call[0] != "srun"]


ASKS = ["scontrol", "--oneliner", "show", "job"]


def test_a_job_that_saved_goes_back_into_the_queue(fakes: Fakes, tmp_path: Path) -> None:
    code, asked = finish(fakes, tmp_path / "run", 75)
    assert (code, asked) == (75, [[*ASKS, "42"], ["scontrol", "requeue", "42"]])
    line = (tmp_path / "run/jobs/1/ends").read_text().split()
    assert line[:3] == ["42", "0", "75"]
    # FAILURES 9: the last element of an array has the number of the whole array for its own.
    array: dict[str, Any] = {"SLURM_ARRAY_JOB_ID": 42, "SLURM_ARRAY_TASK_ID": 1}
    sweep = (("--lr", "0.1"), ("--lr", "$(touch broken)"))
    code, asked = finish(fakes, tmp_path / "run", 75, sweep=sweep, **array)
    assert (code, asked[2:]) == (75, [[*ASKS, "42_1"], ["scontrol", "requeue", "42_1"]])
    assert fakes.calls("srun")[1][-2:] == ["--lr", "$(touch broken)"]


RUNS = """#!/bin/bash
# As srun does: each task runs what it is given; the highest code counts.
shift
SLURM_PROCID=0 "$@"; first=$?
SLURM_PROCID=1 "$@"; second=$?
exit $((first > second ? first : second))
"""


def python(folder: Path, text: str) -> str:
    """A program in the place of Python's."""
    (folder / "python").write_text(f"#!/bin/bash\n{text}")
    (folder / "python").chmod(0o755)
    return str(folder / "python")


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((75, 75), 75), ((75, 143), 75), ((3, 143), 3), ((0, 9), 9)]
)
def test_the_code_is_that_of_the_first_rank_that_left(
    codes: tuple[int, int], code: int, fakes: Fakes, tmp_path: Path
) -> None:
    (fakes.path / "srun").write_text(RUNS)
    ends = python(tmp_path, f"codes=({codes[0]} {codes[1]})\nexit ${{codes[SLURM_PROCID]}}\n")
    done = run_script(write(request(), PLAIN, place(tmp_path / "run", python=ends)), fakes)
    assert done.returncode == code
    failed = code not in (0, 75)
    kept = sorted(path.name for path in (tmp_path / "run/jobs/1").iterdir())
    assert kept == ["ends", "failure"][: 1 + failed]
    assert done.stderr.startswith("\nshoal: 42 failed:\n" * failed)
    assert bool(done.stderr) == failed


def test_ranks_that_have_saved_are_no_failure_to_srun(fakes: Fakes, tmp_path: Path) -> None:
    (fakes.path / "srun").write_text(RUNS.replace("exit $((", "echo $first $second; exit $(("))
    where = place(tmp_path / "run", python=python(tmp_path, "exit 75\n"))
    text = write(request(), PLAIN, where)
    assert run_script(text, fakes).stdout.splitlines()[0] == "0 0"
    # Where that can't be kept, they say it themselves.
    done = run_script(text.replace("first=$folder/", "first=$folder/none/"), fakes)
    assert (done.returncode, done.stdout.splitlines()[0]) == (75, "75 75")


def test_a_job_that_did_not_save_is_left_alone(fakes: Fakes, tmp_path: Path) -> None:
    """Slurm is asked whether a node died, after a failure; nothing is changed."""
    for code in (0, 1, 137):
        (fakes.folder / "calls").unlink(missing_ok=True)
        exit_code, asked = finish(fakes, tmp_path / "run", code)
        assert exit_code == code
        assert [call[2] for call in asked] == ["show", "show"] * (code != 0)


@pytest.mark.parametrize(
    ("state", "changes", "requeued"),
    [
        ("RUNNING Reason=None", {}, True),
        ("COMPLETING Reason=TimeLimit", {}, True),
        ("TIMEOUT Reason=TimeLimit", {}, True),
        ("CANCELLED Reason=None", {}, False),
        ("COMPLETING Reason=None", {}, False),
        ("PREEMPTED Reason=None", {}, False),
        # Not for ever.
        ("RUNNING Reason=None", {"SLURM_RESTART_COUNT": 100}, False),
        ("RUNNING Reason=None", {"requeue": False}, False),
    ],
)
def test_who_ended_a_job_has_decided(
    state: str, changes: dict[str, Any], requeued: bool, fakes: Fakes, tmp_path: Path
) -> None:
    code, asked = finish(fakes, tmp_path / "run", 75, state, **changes)
    assert code == 75
    assert (["scontrol", "requeue", "42"] in asked) == requeued
    assert bool(asked) == (not changes)
    text = write(request(), Site(name="x", requeue="requeue" not in changes), place(tmp_path))
    assert ("--no-requeue" in directives(text)) == ("requeue" in changes)


@pytest.mark.parametrize(("ended", "failed"), [(0, False), (1, True), (128 + signal.SIGTERM, False)])
def test_a_requeue_that_ends_its_own_command_has_not_failed(
    ended: int, failed: bool, fakes: Fakes, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to all processes of a job that it requeues."""
    fakes.set("srun", code=75)
    fakes.set("scontrol", code=ended, out="JobState=RUNNING Reason=None\n")
    done = run_script(write(request(), PLAIN, place(tmp_path / "run")), fakes)
    assert ("requeueing failed" in done.stderr) == failed


def test_a_cancelled_job_saves_and_stays_ended(fakes: Fakes, tmp_path: Path) -> None:
    mark = tmp_path / "run/jobs/1/cancelled"
    program = fakes.path / "srun"
    program.write_text(program.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\ntouch {mark}\n"))
    assert finish(fakes, tmp_path / "run", 75) == (75, [])
    # Nor does one begin that had saved and was on its way back into the queue.
    again: tuple[dict[str, Any], ...] = ({}, {"chain": 2}, {"requeue": False})
    for changes in again:
        assert finish(fakes, tmp_path / "run", 0, **changes) == (75, [])
    assert len(fakes.calls("srun")) == 1


def test_a_chain_goes_on_until_it_is_finished(fakes: Fakes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "jobs/1/jobs").write_text("41\n42\n43\n44\n")
    assert finish(fakes, folder, 75, chain=4) == (75, [])
    taken_back = [["scancel", "--quiet", job] for job in ("43", "44")]
    assert finish(fakes, folder, 0, chain=4) == (0, taken_back)
    # One that was started all the same does nothing.
    assert finish(fakes, folder, 1, chain=4) == (0, taken_back)
    assert len(fakes.calls("srun")) == 2


def test_elements_of_a_chain_of_arrays_end_each_by_itself(fakes: Fakes, tmp_path: Path) -> None:
    each: dict[str, Any] = {"chain": 2, "sweep": (("a",), ("b",)), "SLURM_ARRAY_JOB_ID": 42}
    assert finish(fakes, tmp_path / "run", 0, SLURM_ARRAY_TASK_ID=0, **each) == (0, [])
    finish(fakes, tmp_path / "run", 0, SLURM_ARRAY_TASK_ID=0, **each)
    finish(fakes, tmp_path / "run", 75, SLURM_ARRAY_TASK_ID=1, **each)
    assert [call[-1] for call in fakes.calls("srun")] == ["a", "b"]


def test_inside_of_a_container(fakes: Fakes, tmp_path: Path) -> None:
    """FAILURES 15: the script outside of it asks scontrol; inside nothing does."""
    text = write(request(), PLAIN, place(tmp_path / "run", image="an image.sif"))
    assert run_script(text, fakes).returncode == 0
    [call] = fakes.calls("srun")
    inside = ["apptainer", "exec", "--nv"]
    inside += ["--bind", f"{tmp_path}/run", "--bind", f"{tmp_path}/run/jobs/1"]
    assert ranks(call)[:9] == [*inside, "an image.sif", "python"]


def test_what_is_staged_is_what_the_script_is_told_of(fakes: Fakes, tmp_path: Path) -> None:
    """On two nodes, whose own disk is below `tmp_path`."""
    folder, disk = tmp_path / "run", f"{tmp_path}/disk/shoal-42"
    for path in (folder / "my data/a b", folder / "envs/one/bin", Path(disk)):
        path.mkdir(parents=True)
    (folder / "my data/a b/file").write_text("content")
    where = place(
        folder,
        python=f"{folder}/envs/one/bin/python",
        args=("--data=my data/a b", f"{folder}/my data", "my data2", "--lr=my", "../run/my data"),
        stage=(f"{folder}/my data", f"{folder}/envs/one"),
    )
    text = write(request(), PLAIN, where)
    variables = {"TMPDIR": str(tmp_path / "disk"), "SLURM_JOB_NUM_NODES": "2"}
    done = run_script(text, fakes, variables)
    assert (done.returncode, done.stderr) == (0, "")
    calls = fakes.calls("srun")
    script = f"{folder}/jobs/1/source/train.py"
    args = [f"--data={disk}/my data/a b", f"{disk}/my data", "my data2", "--lr=my", f"{disk}/my data"]
    assert ranks(calls[-2]) == [f"{disk}/one/bin/python", script, *args]
    for call in [*calls[:-2], calls[-1]]:
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= {*call}
    assert calls[-1][-4:] == ["rm", "-rf", "--", disk]
    assert len(fakes.calls("sbcast")) == 2
    # Without its copies a job does not begin.
    fakes.set("sbcast", code=1)
    done = run_script(text, fakes, variables)
    assert done.returncode == 1
    assert "can't copy to" in done.stderr
    begun = [call for call in fakes.calls("srun")[len(calls) :] if script in call]
    assert begun == []


@pytest.mark.parametrize(
    "name", ["a disk", "$(touch ran)", "`touch ran`; touch ran", '"; touch ran #', "'\\\n"]
)
def test_the_disk_of_a_node_is_one_word(name: str, fakes: Fakes, tmp_path: Path) -> None:
    """Only its variables are replaced."""
    folder = tmp_path / "run"
    (folder / "data").mkdir()
    disk = f"{tmp_path}/$LOGNAME/{name}"
    where = place(folder, args=("data",), stage=(f"{folder}/data",))
    text = write(request(), replace(PLAIN, local=disk), where)
    staged = Path(f"{tmp_path}/me/{name}/shoal-42")
    staged.mkdir(parents=True)
    done = run_script(text, fakes, {"LOGNAME": "me", "SLURM_JOB_NUM_NODES": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    calls = fakes.calls("srun")
    assert ranks(calls[-2])[-1] == f"{staged}/data"
    assert calls[-1][-4:] == ["rm", "-rf", "--", str(staged)]
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("launcher", "code", "ranks", "expected"),
    [
        ("torchrun", "1", ["preempted", "preempted"], 75),
        ("torchrun", "1", ["preempted", "save_failed"], 1),
        ("torchrun", "1", ["preempted"], 1),  # the other rank never opened the run
        ("mpirun", "143", ["preempted", "preempted"], 75),
        ("mpirun", "75", ["preempted", "preempted"], 75),
        ("mpirun", "75", ["preempted", "save_failed"], 1),
        ("mpirun", "75", ["closed", "closed"], 75),  # the script's own
        ("mpirun", "75 early", ["preempted"], 75),
        ("mpirun", "3", ["preempted", "save_failed"], 3),
        ("mpirun", "75", [], 75),
        ("srun", "1", ["preempted", "preempted"], 75),
        ("srun", "75", ["preempted", "save_failed"], 75),
    ],
)
def test_the_ranks_record_whether_all_have_saved(
    launcher: str, code: str, ranks: list[str], expected: int, fakes: Fakes, tmp_path: Path
) -> None:
    assert end_with_records(fakes, tmp_path / "run", launcher, code, ranks) == expected


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize(
    ("program", "killed"), [('kill -TERM $$; kill -USR1 $$; exec "$@"', False), ("exit 127", True)]
)
def test_no_answer_about_the_ranks_changes_nothing(
    program: str, killed: bool, launcher: str, fakes: Fakes, tmp_path: Path
) -> None:
    """Schedulers send signals to all processes of a job, also to `shoal last-exit`."""
    command = python(tmp_path, program.replace('"$@"', f'{sys.executable} "$@"'))
    code = "1" if launcher == "torchrun" else "75"
    ended = end_with_records(fakes, tmp_path / "run", launcher, code, ["preempted"] * 2, command)
    assert ended == (int(code) if killed else 75)


def end_with_records(
    fakes: Fakes,
    folder: Path,
    launcher: str,
    code: str,
    ranks: list[str],
    command: str = sys.executable,
) -> int:
    """The launcher's stand-in keeps the exit code of a rank and writes what the ranks would."""
    (folder / "events").mkdir()
    where = place(folder, python=command)
    text = write(request(launcher=launcher, nodes=2, processes=2), PLAIN, where)
    program = fakes.path / ("mpirun" if launcher == "mpirun" else "srun")
    lines = [f"echo '{code}' > {folder}/jobs/1/first-42-0"]
    for rank, kind in enumerate(ranks):
        reason = "error" if kind == "save_failed" else "closed"
        record = [{"event": "start", "began": 1, "size": 2}, {"event": kind}]
        for event in (*record, {"event": "end", "reason": reason}):
            lines.append(f"echo '{json.dumps(event)}' >> {path_of(folder, rank)}")
        lines.append(f"touch -d tomorrow {path_of(folder, rank)}")
    before = path_of(folder, 0)  # an attempt before, whose ranks have saved
    before.write_text('{"event": "start", "began": 0, "size": 1}\n{"event": "preempted"}\n')
    os.utime(before, (1, 1))
    kept = program.read_text()
    program.write_text(kept.replace("#!/bin/bash\n", "\n".join(["#!/bin/bash", *lines, ""])))
    fakes.set("scontrol", out="node01\nJobState=RUNNING\n")
    return run_script(text, fakes).returncode


def test_the_command_of_torchrun(fakes: Fakes, tmp_path: Path) -> None:
    where = place(tmp_path / "run", script="argv.py", args=("--run", "--", "-n"))
    text = write(request(launcher="torchrun", nodes=2, processes=4), PLAIN, where)
    fakes.set("scontrol", out="node01\nJobState=RUNNING\n")
    assert run_script(text, fakes).returncode == 0
    call = fakes.calls("srun")[0]
    assert ranks(call)[:4] == ["python", "-P", "-m", "torch.distributed.run"]
    # Without the first dashes, torchrun takes options of the script for abbreviations of its own.
    assert ranks(call)[-5:] == ["--", "argv.py", "--run", "--", "-n"]
    assert call[call.index("--rdzv-endpoint") + 1] == "node01:10043"
    assert "--signal=TERM@300" in directives(text)


def test_mpirun_is_told_by_the_batch_script(fakes: Fakes, tmp_path: Path) -> None:
    program = fakes.path / "mpirun"
    # It tells its parent's process, which is the batch script, as Slurm would, and waits to be told.
    program.write_text(
        "#!/bin/bash\ntrap 'kill $waits; exit 75' USR1\nsleep 30 & waits=$!\nkill -USR1 $PPID\nwait\n"
    )
    fakes.set("scontrol", out="JobState=RUNNING\n")
    text = write(request(launcher="mpirun", processes=3), PLAIN, place(tmp_path / "run"))
    assert run_script(text, fakes).returncode == 75
    assert fakes.calls("scontrol")[-1] == ["scontrol", "requeue", "42"]
    assert "--signal=B:USR1@300" in directives(text)
