"""`shoal submit` on a real Grid Engine: what was submitted runs, is told to save, and goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.grid_engine import SLOTS, GridEngine, missing
from helpers.scripts import trained, trained_alone
from helpers.submitted_jobs import Jobs
from shoal.tools.submit.site_catalog import read_site

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(900)]
PLACES = pytest.mark.parametrize(
    "place", ["-p one --nodes=2 -n 2", pytest.param("-p smp -n 2", marks=pytest.mark.long)]
)

SITE = """
scheduler = "gridengine"
mpirun = ["mpirun.openmpi"]
local = "/dev/shm"
"""
for name in ("one", "two", "smp", "any", "unknown"):
    SITE += f'[partitions.{name}]\noption = "all.q"\nparallel_environment = "{name}"\n'
SITE += '[partitions.gone]\noption = "gone.q"\n'


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    if missing():
        pytest.skip(missing())
    rules = {"one": "1", "two": "2", "smp": "$pe_slots", "any": "$round_robin"}
    queue = {"h_rt": "1:00:00", "notify": "00:00:20"}
    folder = tmp_path_factory.mktemp("grid") / "cluster"
    with GridEngine(folder, environments=rules, queue=queue) as running:
        running.add_queue("urgent.q", {"subordinate_list": "all.q=1"})
        yield running


@pytest.fixture
def jobs(cluster: GridEngine, tmp_path: Path) -> Iterator[Jobs]:
    """After each test nothing of it is left in the queue."""
    folder = tmp_path / "a run"
    (folder / "config/shoal/sites").mkdir(parents=True)
    (folder / "config/shoal/sites/grid.toml").write_text(SITE)
    found = Jobs(cluster, folder)
    found.variables["SHOAL_SITE"] = "grid"
    yield found
    cluster.run(["qdel", "-u", "root"])
    found.wait(found.gone)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ("-p two --nodes=3 -n 5", 5),  # 2, 2 and 1
        pytest.param("-p smp -n 2", 2, marks=pytest.mark.long),
        pytest.param("-p smp -n 1", 1, marks=pytest.mark.long),
    ],
)
def test_the_same_parameters_as_one_process(
    arguments: str, size: int, jobs: Jobs, alone: list[float]
) -> None:
    given = (str(size), "0", "run", "a b", "$HOME", "it's")
    jobs.submit(*arguments.split(), "train.py", "--", *given)
    jobs.wait_for_codes(0)
    assert trained(jobs.log()) == [alone], jobs.log()
    assert "['a b', '$HOME', \"it's\"]" in jobs.log()
    assert "finished" in jobs.shoal("status", "run")


@PLACES
def test_a_job_that_is_suspended_saves_and_goes_on(place: str, jobs: Jobs, alone: list[float]) -> None:
    """On one node Grid Engine starts it again, on several a new job continues."""
    number = jobs.submit(*place.split(), "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(3)
    assert "since" in jobs.shoal("status", "run")
    jobs.command("qmod", "-sj", number)
    jobs.wait_for_codes(75, 0)
    assert trained(jobs.log()) == [alone], jobs.log()
    assert "USR1 on rank" in jobs.log()
    assert "resumed at sample" in jobs.log()
    again = int(jobs.ends()[1][0])
    assert again == int(number) if "smp" in place else again > int(number)
    assert f"{again}  " in jobs.shoal("status", "run")


def test_a_job_that_a_more_urgent_queue_preempts(jobs: Jobs, alone: list[float]) -> None:
    jobs.submit("-p", "one", "--nodes=3", "-n", "3", "train.py", "--", "3", "2", "run")
    jobs.wait_for_step(3)
    urgent = ["qsub", "-terse", "-b", "y", "-q", "urgent.q", "-o", "/dev/null", "-j", "y", "sleep", "3"]
    jobs.command(*urgent)
    jobs.wait_for_codes(75, 0)
    assert trained(jobs.log()) == [alone], jobs.log()


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "same"), [("4", True), ("30", False)])
def test_the_time_limit_is_a_requeue(seconds: str, same: bool, jobs: Jobs, alone: list[float]) -> None:
    """The batch script tells the ranks 15 s before it; a step of 30 s ends after it."""
    place = ("--time", "1", "-p", "smp", "-n", "2")
    number = jobs.submit(*place, "train.py", "--", "2", seconds, "run")
    jobs.wait_for_codes(75, 0)
    assert [job == number for job, _ in jobs.ends()] == [True, same]
    assert trained(jobs.log()) == [alone]


def test_one_element_of_an_array_is_requeued(jobs: Jobs, alone: list[float]) -> None:
    (jobs.folder / "sweep").write_text("2 0.3 one\n2 2 two\n")
    number = jobs.submit("-p", "smp", "-n", "2", "--sweep", "sweep", "--at-once", "2", "train.py")
    for run in ("one", "two"):
        jobs.wait_for_step(2, run)
    jobs.command("qmod", "-sj", f"{number}.2")
    jobs.wait(lambda: len(jobs.ends()) == 3)
    assert sorted(jobs.ends()) == [(f"{number}.1", 0), (f"{number}.2", 0), (f"{number}.2", 75)]
    assert trained(jobs.log("-0")) == trained(jobs.log("-1")) == [alone]
    assert "resumed" not in jobs.log("-0")
    assert "resumed" in jobs.shoal("logs", "--element", "1", "run")


def test_a_job_that_is_cancelled_has_saved_and_does_not_come_back(jobs: Jobs) -> None:
    jobs.submit("-p", "one", "--nodes=2", "-n", "2", "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(2)
    assert "saves a checkpoint and ends" in jobs.shoal("cancel", "run")
    jobs.wait(jobs.gone)
    jobs.wait_for_codes(75)
    jobs.wait_for_log("has saved and is cancelled")
    assert "saved, to be resumed" in jobs.shoal("status", "run")
    assert list((jobs.folder / "run/checkpoints").glob("step-*"))


@pytest.mark.long
def test_qdel_saves_and_a_chain_goes_on(jobs: Jobs, alone: list[float]) -> None:
    first = jobs.submit("--chain", "3", "-p", "smp", "-n", "2", "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(2)
    jobs.command("qdel", first)
    jobs.wait(jobs.gone)
    assert jobs.ends() == [(first, 75), (str(int(first) + 1), 0)]
    assert trained(jobs.log()) == [alone]


@pytest.mark.long
def test_each_node_has_a_copy_of_its_own(jobs: Jobs) -> None:
    """Its own disk is here /dev/shm, which the nodes do not share."""
    (jobs.folder / "my data/deep").mkdir(parents=True)
    (jobs.folder / "my data/deep/file").write_text("content")
    (jobs.folder / "train.py").write_text(
        "import os, sys\nprint(os.uname().nodename, sys.argv[1], open(sys.argv[1]).read())\n"
    )
    place = ("-p", "one", "--nodes", "3", "-n", "3", "--stage", "my data")
    number = jobs.submit(*place, "train.py", "--", "my data/deep/file")
    jobs.wait_for_codes(0)
    lines = [line.partition(" ") for line in jobs.log().splitlines() if "content" in line]
    assert {line[2] for line in lines} == {f"/dev/shm/shoal-{number}/my data/deep/file content"}
    assert len({line[0] for line in lines}) == 3


def test_a_rank_that_fails_ends_the_job(jobs: Jobs) -> None:
    (jobs.folder / "raises.py").write_text(
        "import torch, shoal\n"
        "with shoal.init() as world:\n"
        "    if world.rank == 1:\n"
        "        raise ValueError('no')\n"
        "    world.all_reduce(torch.ones(()))\n"
    )
    jobs.submit("-p", "one", "--nodes", "2", "-n", "2", "raises.py")
    jobs.wait_for_codes(1)
    jobs.wait(jobs.gone)
    *_, reason, place = jobs.log().splitlines()
    assert reason == "ValueError: no", jobs.log()
    assert re.match(r"where: rank 1 of 2 on node\d\d, .*raises.py:4", place)


@PLACES
def test_a_node_dies(place: str, jobs: Jobs, cluster: GridEngine, alone: list[float]) -> None:
    """Grid Engine restarts a job whose first node is silent; for another one, the batch script does."""
    # The defaults take minutes: connections to a node without power stay open.
    train = (jobs.folder / "train.py").read_text().replace("seed=1", "seed=1, timeout=15")
    (jobs.folder / "train.py").write_text(train.replace("run.tick()", "run.tick(every=2)"))
    keepalive = {"time": "5", "intvl": "2", "probes": "2"}
    jobs.variables |= {f"OMPI_MCA_oob_tcp_keepalive_{name}": keepalive[name] for name in keepalive}
    jobs.submit(*place.split(), "train.py", "--", "2", "1.5", "run")
    jobs.wait_for_step(5)
    first = [node for node in cluster.nodes if cluster.running(node, "mpirun.openmpi -n")]
    used = [node for node in cluster.nodes if cluster.running(node, "train.py")]
    [lost] = set(used) - set(first) or first
    cluster.kill(lost)
    try:
        jobs.wait(lambda: trained(jobs.log()) != [])
    finally:
        cluster.revive(lost)
    assert trained(jobs.log()) == [alone], jobs.log()
    assert "resumed at sample" in jobs.log()
    jobs.wait(jobs.gone)


@pytest.mark.long
def test_a_daemon_that_dies_and_comes_back_changes_nothing(
    jobs: Jobs, cluster: GridEngine, alone: list[float]
) -> None:
    jobs.submit("-p", "one", "--nodes=3", "-n", "3", "train.py", "--", "3", "0.3", "run")
    jobs.wait_for_step(2)
    for node in cluster.nodes[:2]:
        cluster.kill_execd(node)
        cluster.revive_execd(node)
    jobs.wait_for_codes(0)
    assert trained(jobs.log()) == [alone]
    assert "resumed" not in jobs.log()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("-p smp -n 9", "no suitable queues"),  # a node has 8 slots
        ("-p smp -n 2 --time 2:00:00", "no suitable queues"),  # the queue's limit is an hour
        ("-p unknown -n 2", "unknown is not a parallel environment"),
        ("-p smp --nodes 2 -n 2", "allocation rule $pe_slots"),
        ("-p any --nodes 2 -n 2", "allocation rule $round_robin"),
        ("-p gone -n 1", 'unknown queue "gone.q"'),
        ("-p nowhere -n 1", "--partition nowhere"),
        ("-p smp -n 2 -A nobody", 'requested project "nobody" does not exist'),
        ("-p smp -n 2 --mem 4G", "Grid Engine has no such option"),
    ],
)
def test_what_can_never_run_is_refused(arguments: str, told: str, jobs: Jobs) -> None:
    done = jobs.try_shoal("submit", "--run", "run", "--time", "10:00", *arguments.split(), "train.py")
    assert done.returncode == 2, done.stdout
    assert told in done.stderr.replace("\n       ", " ")
    assert not (jobs.folder / "run").exists()
    assert jobs.gone()


def test_a_site_is_drafted(jobs: Jobs) -> None:
    """By its own scheduler: `shoal sites new` takes Slurm where that is installed too."""
    code = "from shoal.tools.submit.gridengine.scheduler import GridEngine\n"
    code += "print(GridEngine().draft_site('mini'))"
    text = jobs.command(sys.executable, "-c", code)
    queue = read_site("mini", text, "mini.toml").partitions["all.q"]
    assert (queue.nodes, queue.cores, queue.time) == (3, SLOTS, 3600)
    assert queue.parallel_environment == "one"
