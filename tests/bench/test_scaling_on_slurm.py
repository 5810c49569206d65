"""Scaling studies as jobs of Slurm's: the plan, its scripts under stand-ins, what is collected."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from helpers.cli import fake_slurm
from helpers.cli import shoal as run_command
from helpers.fake_slurm import PLAIN, Fakes, place, request, run_script, write
from shoal.tools.bench.scaling.aggregate import Repeat, different_nodes_note
from shoal.tools.bench.scaling.configurations import StudyOptions
from shoal.tools.bench.scaling.directory import Study, begin_study, load_study
from shoal.tools.bench.scaling.submission import Capacity, ClusterRequest, allocations, node_capacity
from shoal.tools.submit.scheduler import JobCommand
from shoal.tools.submit.site_catalog import Partition, Site
from shoal.util.errors import CheckpointError, LaunchError, ShoalError

MINI = """
default = "main"
[partitions.main]
gpus = 4
cores = 32
cpus_per_gpu = 8
nodes = 4
"""
GPUS = Partition(name="main", gpus=4, cores=32, cpus_per_gpu=8, nodes=4)
CORES = Partition(name="main", gpus=0, cores=32)
FULL = StudyOptions(model="dense", processes=(1, 2, 4, 8), backends=("gloo", "mpi"), batch=8, rounds=2)


def site(partition: Partition | None) -> Site:
    if partition is None:
        return Site(name="plain")
    return Site(name="mini", default="main", partitions={"main": partition})


def test_a_node_takes_what_the_site_says_or_the_user() -> None:
    for partition, asked, found in (
        (GPUS, ClusterRequest(), (4, True, 8, 4)),
        (GPUS, ClusterRequest(gpus=2, cpus=3), (2, True, 3, 4)),
        (GPUS, ClusterRequest(gpus=0), (32, False, 1, 4)),
        (GPUS, ClusterRequest(tasks=8), (8, False, 4, 4)),
        (CORES, ClusterRequest(), (32, False, 1, None)),
        (CORES, ClusterRequest(cpus=5), (6, False, 5, None)),
        (None, ClusterRequest(gpus=4), (4, True, None, None)),
        (None, ClusterRequest(tasks=6), (6, False, None, None)),
    ):
        fits = node_capacity(site(partition), asked)
        assert (fits.tasks, fits.gpus, fits.cpus, fits.most) == found, partition
    # What nobody knows is asked for.
    for partition, asked, told in (
        (None, ClusterRequest(), "the number of processes per node is unknown"),
        (GPUS, ClusterRequest(partition="fast"), "mini has main"),
    ):
        with pytest.raises(LaunchError, match=told):
            node_capacity(site(partition), asked)


FOUR = Capacity(where="mini", tasks=4, gpus=True, cpus=8, most=4)


def test_sizes_that_do_not_fit_the_nodes_are_refused() -> None:
    for sizes, told in (
        ((1, 32), "is 4 nodes per job with 4 processes each: 16"),
        ((5,), "5 processes can't be split evenly over 2 nodes"),
    ):
        FOUR.check((1, 2, 4, 6, 16))
        with pytest.raises(LaunchError, match=told):
            FOUR.check(sizes)


def test_what_fits_on_as_many_nodes_shares_them_in_the_order_of_the_plan(tmp_path: Path) -> None:
    missing = begin_study(tmp_path, FULL).missing()
    found = {each.name: each for each in allocations(missing, FOUR)}
    assert list(found) == ["nodes-1", "nodes-1-mpi", "nodes-2", "nodes-2-mpi"]
    assert (found["nodes-1"].sizes, found["nodes-1"].per_node) == ([1, 2, 4], 4)
    assert (found["nodes-2-mpi"].sizes, found["nodes-2-mpi"].per_node) == ([8], 4)
    one = found["nodes-1"].trainings
    assert [number for number, _ in one] == [0, 0, 0, 1, 1, 1]
    assert [each for _, each in one[:3]] == [each for _, each in one[3:]][::-1]
    assert sorted(map(str, missing)) == sorted(
        str(t) for each in found.values() for t in each.trainings
    )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Slurm's commands, and a directory to work in."""
    return fake_slurm(tmp_path, monkeypatch, submitted="42\n", sites={"mini": MINI})


RUNS = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
ACTS = """#!/bin/bash
echo "in $2"
case $2 in
    bad) exit 3 ;;
    told) exit 75 ;;
    long) exec sleep 60 ;;
    cancelled) : > "$CANCEL"; exit 143 ;;
esac
"""


def take_turns(fakes: Fakes, folder: Path, *words: str, limit: int = 30) -> tuple[int, dict[str, str]]:
    """Run a job with such turns; its exit code, and of each that has ended its own."""
    (fakes.path / "srun").write_text(RUNS)
    (folder / "jobs/1").mkdir(parents=True)
    acts = folder / "acts"
    acts.write_text(ACTS)
    acts.chmod(0o755)
    turns = tuple(JobCommand(args=(word,), processes=1, log=str(folder / word)) for word in words)
    asked = request(turns=turns, limit=limit, variables=(("A", "b c"),))
    text = write(asked, PLAIN, place(folder, python=str(acts), variables=asked.variables))
    assert "export A='b c'\n" in text
    done = run_script(text, fakes, {"CANCEL": str(folder / "jobs/1/cancelled")})
    assert done.stderr == ""
    ends = {path.stem: path.read_text().split()[0] for path in folder.glob("*.end")}
    return done.returncode, ends


@pytest.mark.parametrize(
    ("words", "limit", "code", "ends"),
    [
        # One that fails ends no other.
        ("one bad two", 30, 0, {"one": "0", "bad": "3", "two": "0"}),
        # One that is ended from outside has no end and is the last.
        ("one told two", 30, 75, {"one": "0"}),
        ("one cancelled two", 30, 75, {"one": "0"}),
        pytest.param("long one", 1, 0, {"long": "124", "one": "0"}, marks=pytest.mark.full),
    ],
)
def test_turns_follow_each_other(
    words: str, limit: int, code: int, ends: dict[str, str], fakes: Fakes, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    assert take_turns(fakes, folder, *words.split(), limit=limit) == (code, ends)
    assert (folder / "one").read_text() == "in one\n"
    assert (folder / "two").exists() == ("two" in ends)


def test_each_turn_has_as_many_processes_as_it_needs(tmp_path: Path) -> None:
    srun, around = "srun --kill-on-bad-exit=1", 'bash -c "$around" "$first" python'
    for launcher, told in (
        ("srun", f"turn two.txt {srun} --nodes=2 --ntasks=2 --ntasks-per-node=1 {around}"),
        ("mpirun", f"turn two.txt mpirun -n 2 {around}"),
        ("torchrun", f"turn two.txt {srun} {around} -P -m torch.distributed.run"),
    ):
        turns = tuple(
            JobCommand(args=(), processes=size, log=f"{name}.txt")
            for name, size in (("two", 2), ("four", 4))
        )
        asked = request(time=60, nodes=2, processes=4, turns=turns, limit=9, launcher=launcher)
        text = write(asked, PLAIN, place(tmp_path))
        assert told in text, launcher
        assert "--ntasks-per-node=2\n" in text or launcher == "torchrun"
        assert "#SBATCH --no-requeue\n" in text, launcher
        assert "--signal" not in text, launcher


def shoal(*arguments: str) -> Result:
    return run_command("bench", *arguments)


def refused(*arguments: str) -> ShoalError:
    done = shoal(*arguments)
    assert isinstance(done.exception, ShoalError), (done.output, done.exception)
    return done.exception


STUDY = ("scaling", "dense", "-n", "1,2,8", "--rounds", "2")
SLURM = ("--submit", "--site", "mini")
ASKED = (*STUDY, *SLURM, "--study", "s")


def test_a_dry_run_prints_the_scripts_and_makes_nothing(fakes: Fakes) -> None:
    before = sorted(os.listdir())
    done = shoal(*ASKED, "--dry-run")
    assert done.exit_code == 0, done.exception
    assert done.stdout.count("#!/bin/bash\n") == 2
    assert (
        "job: 1 node with 2 GPU(s), 4 training(s) on 1, 2 process(es), 00:44:00 at most" in done.stderr
    )
    assert "job: 2 nodes with 4 GPU(s), 2 training(s) on 8 process(es), 00:22:00 at most" in done.stderr
    assert done.stdout.count("export OMP_NUM_THREADS=8\n") == 2
    assert (fakes.calls(), sorted(os.listdir())) == ([], before)


def results(study: Study, reason: str) -> None:
    for number, configuration in study.missing():
        study.keep(
            configuration,
            Repeat(
                key=configuration.key, round=number, began=0, seconds=1, measured=None, reason=reason
            ),
        )


def test_only_what_is_missing_is_submitted_again(fakes: Fakes) -> None:
    done = shoal(*ASKED)
    assert done.exit_code == 0, done.exception
    assert "job 42: 1 node with 2 GPU(s), 4 training(s)" in done.output
    assert "shoal bench collect s" in done.output
    assert len(fakes.calls("sbatch")) == 3  # with a look for it first
    fakes.set("squeue", out="42|PENDING|0:00|44:00|Priority\n")
    again = shoal(*ASKED)
    assert again.exit_code == 1
    assert len(fakes.calls("sbatch")) == 4
    assert "job 42: 4 pending: shoal status s/submitted/nodes-1" in again.output
    # One round of the first job has ended; then Slurm forgets the job.
    study = load_study(Path("s"))
    for number, configuration in study.missing():
        if number == 0 and configuration.processes < 8:
            folder = study.job(configuration, number)
            (folder / "log.txt").write_text("ValueError: no such layer\n")
            (folder / "log.txt.end").write_text("1 100 103\n")
    fakes.set("squeue", code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    collected = shoal("collect", "s")
    assert collected.exit_code == 1, collected.exception
    assert "ValueError: no such layer" in collected.output
    assert "4 of 6 training runs have no result yet" in collected.output
    assert "job 42: 2 ended: shoal logs s/submitted/nodes-1" in collected.output
    last = shoal(*ASKED)
    assert "2 training(s) on 1, 2 process(es)" in last.output
    assert "2 training(s) on 8 process(es)" in last.output
    results(load_study(Path("s")), "no")
    whole = shoal("collect", "s")
    assert (whole.exit_code, "no result" in whole.output) == (0, False)
    assert len(fakes.calls("sbatch")) == 7


@pytest.mark.full
def test_where_slurm_is_missing_what_there_is_can_be_read(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shoal(*ASKED).exit_code == 0
    monkeypatch.setenv("PATH", "/nowhere")
    found = shoal("collect", "s")
    assert found.exit_code == 1
    assert "there is no squeue on this machine's PATH" in found.output
    assert "there is no sbatch" in refused(*STUDY, *SLURM).found
    assert not Path("studies").exists()
    # A study here and one under Slurm are two.
    here = replace(load_study(Path("s")).options, threads=8)
    with pytest.raises(CheckpointError, match="site main of mini, now None"):
        begin_study(Path("s"), here)


def test_what_cannot_be_submitted_is_refused_before_anything_is_made(fakes: Fakes) -> None:
    assert "the sites are" in refused(*ASKED, "--site", "mars").found
    assert "is 4 nodes per job" in refused(*ASKED, "-n", "1,32").found
    assert "no --submit" in refused("scaling", "dense", "--site", "mini").found
    assert "it is not a duration" in refused(*ASKED, "--time", "0").found
    assert "a node of main has 4 GPUs" in refused(*ASKED, "--gpus-per-node", "8").found
    assert not Path("s").exists()
    assert fakes.calls() == []


@pytest.mark.full
def test_what_slurm_refuses_leaves_nothing_and_the_jobs_before_it_stay(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir())
    # The look for sbatch succeeds, the second job does not.
    times = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n; "
    (fakes.path / "sbatch").write_text(
        f'#!/bin/bash\n{times}[ "$n" -lt "$MOST" ] && echo 42 || {{ echo too many >&2; exit 1; }}\n'
    )
    for most, left in (("1", False), ("2", True)):
        monkeypatch.setenv("MOST", most)
        Path("n").unlink(missing_ok=True)
        assert "too many" in refused(*ASKED).found
        assert Path("s").exists() == left
    Path("n").unlink()
    assert not (set(os.listdir()) - {*before, "s"})
    assert "4 ended" in shoal("collect", "s").output


@pytest.mark.full
def test_a_script_runs_from_a_copy_of_its_own(fakes: Fakes) -> None:
    Path("train.py").write_text("print('trained')\n")
    script = ("scaling", "train.py", *STUDY[2:], *SLURM, "--study", "s", "--", "--run", "{run}")
    assert shoal(*script).exit_code == 0
    fakes.set("squeue", code=1, err="slurm_load_jobs error: Invalid job id specified\n")
    assert shoal(*script).exit_code == 0
    folder = Path("s/submitted/nodes-2/jobs/2")
    assert [path.name for path in (folder / "source").iterdir()] == ["train.py"]
    text = (folder / "job.sh").read_text()
    assert f"{folder.resolve()}/source/train.py --run {Path('s').resolve()}/jobs/n8-b64" in text


def test_what_is_no_study_cannot_be_collected(fakes: Fakes) -> None:
    Path("empty").mkdir()
    Path("foreign").mkdir()
    Path("foreign/study.json").write_text(json.dumps({"format": "other"}))
    for name in ("empty", "foreign", "missing"):
        assert "shoal bench scaling" in refused("collect", name).fix


def test_nodes_that_fewer_processes_had_and_more_had_not_are_said() -> None:
    def repeat(*hosts: str) -> Repeat:
        return Repeat(key="x", round=0, began=0, seconds=1, measured=None, hosts=hosts)

    assert different_nodes_note([repeat("a"), repeat("a", "b")]) is None
    assert different_nodes_note([repeat("c"), repeat("a", "b")]) == (
        "not all sizes ran on the same nodes, which may differ in speed: 1 on c; 2 on a, b"
    )
