"""`shoal submit` on a real Slurm: what was submitted runs, is told to save, and goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for
from helpers.scripts import AGREEING, trained, trained_alone
from helpers.submitted_jobs import Jobs
from shoal.telemetry import events

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    """After each test nothing of it is left in the queue."""
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    found = Jobs(cluster, folder)
    yield found
    cluster.run(["scancel", "--user=root"])
    found.wait(found.gone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ("--nodes=3 -n 5", 5),  # 2, 2 and 1
        ("-n 2", 2),
        ("--nodes=2 -n 4", 4),
        ("--nodes=4", 4),
        ("--nodes=4 --gpus-per-node=3", 12),  # of 8 GPUs
        ("--nodes=2 --processes=4 --launcher=torchrun", 4),
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


def test_each_node_has_a_copy_of_its_own(jobs: Jobs) -> None:
    """Its own disk is here /dev/shm, which the nodes do not share."""
    folder = jobs.folder / "config/shoal/sites"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('local = "/dev/shm"\n')
    (jobs.folder / "my data/deep").mkdir(parents=True)
    (jobs.folder / "my data/deep/file").write_text("content")
    (jobs.folder / "train.py").write_text(
        "import os, sys\nprint(os.uname().nodename, sys.argv[1], open(sys.argv[1]).read())\n"
    )
    number = jobs.submit(
        *("--site", "mine", "--nodes", "2", "--stage", "my data"), "train.py", "--", "my data/deep/file"
    )
    jobs.wait_for_codes(0)
    place = f"/dev/shm/shoal-{number}/my data/deep/file content"
    lines = [line.partition(" ") for line in jobs.log().splitlines() if "content" in line]
    assert [line[2] for line in lines] == [place, place]
    assert len({line[0] for line in lines}) == 2
    left = jobs.command("srun", "--nodes=2", "ls", "/dev/shm")
    assert "shoal-" not in left


def test_what_was_submitted_runs_after_a_requeue(jobs: Jobs, alone: list[float]) -> None:
    number = jobs.submit("--nodes", "2", "-n", "2", "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(3)
    (jobs.folder / "train.py").write_text("raise SystemExit('this was not submitted')\n")
    jobs.command("scontrol", "requeue", number)
    jobs.wait(lambda: trained(jobs.log()) != [])
    assert trained(jobs.log()) == [alone]
    assert "resumed at sample" in jobs.log()
    jobs.wait(jobs.gone)
    assert jobs.ends()[-1] == (number, 0)


@pytest.mark.long
def test_a_signal_to_one_rank_requeues_one_element(jobs: Jobs, alone: list[float]) -> None:
    """FAILURES 9: it saves and goes back into the queue; the other runs on."""
    (jobs.folder / "sweep").write_text("2 0.3 one\n2 2 two\n")
    number = jobs.submit("-n", "2", "--sweep", "sweep", "train.py")
    for run in ("one", "two"):
        jobs.wait_for_step(2, run)
    # The last element has the number of the whole array.
    jobs.command("scancel", "--signal=USR1", f"{number}_1")
    jobs.wait(lambda: len(jobs.ends()) == 3)
    assert sorted(jobs.ends()) == [(f"{number}_0", 0), (f"{number}_1", 0), (f"{number}_1", 75)]
    assert trained(jobs.log("-0")) == trained(jobs.log("-1")) == [alone]
    assert "resumed" not in jobs.log("-0")
    assert "USR1 on rank" in jobs.log("-1")
    assert "and is requeued" in jobs.log("-1")


@pytest.mark.long
def test_the_time_limit_is_a_requeue(jobs: Jobs, alone: list[float]) -> None:
    """Slurm tells the ranks ahead of it, to within half a minute."""
    jobs.submit("--time", "1", "-n", "2", "train.py", "--", "2", "30", "run")
    jobs.wait_for_codes(75, 0)
    assert trained(jobs.log()) == [alone]


# The first two attempts wait to be told to save; then a save waits: for SIGTERM, or without end.
TWICE = AGREEING.replace(
    "def main():\n",
    """
from pathlib import Path

class Slow:
    def state_dict(self):
        if asked:
            Path(f"saving-{attempt}-{rank}").touch()
        while asked and (attempt == 1 or not told_again):
            time.sleep(0.01)
        return {}
    def load_state_dict(self, state):
        pass

asked, told_again = [], []
signal.signal(signal.SIGTERM, lambda *_: told_again.append(1))

def main():
    global attempt, rank
""",
)
TWICE = TWICE.replace(
    "        assert world",
    "        attempt, rank = world.placement.attempt, world.rank\n        assert world",
)
TWICE = TWICE.replace("step, data) as run", "step, data, state={'slow': Slow()}) as run")
TWICE = TWICE.replace(
    "                run.tick()\n",
    """
                if attempt < 2 and step.number == 5 * (attempt + 1):
                    Path(f"ready-{attempt}-{rank}").touch()
                    while not run._stopping._asked:
                        time.sleep(0.01)
                    asked.append(1)
                run.tick()
""",
)
TWICE = TWICE.replace("            run.save()\n", "")


@pytest.mark.long
def test_a_second_preemption_during_the_save(jobs: Jobs, alone: list[float]) -> None:
    """A save that ends between SIGTERM and SIGKILL is whole, one that does not never was.

    Either way Slurm puts the job back once, and no sample is lost or taken twice.
    """
    (jobs.folder / "twice.py").write_text(TWICE)
    number = jobs.submit("--nodes", "2", "-n", "2", "twice.py", "--", "2", "0", "run")
    for attempt in (0, 1):
        jobs.wait_for_files(f"ready-{attempt}-0", f"ready-{attempt}-1")
        jobs.command("scancel", "--signal=USR1", number)
        jobs.wait_for_files(f"saving-{attempt}-0", f"saving-{attempt}-1")
        jobs.command("scontrol", "requeue", number)
    jobs.wait(lambda: trained(jobs.log()) != [])
    jobs.wait(jobs.gone)
    assert trained(jobs.log()) == [alone]
    (saved,) = re.findall(r"saved step (\d+)", jobs.log())
    assert re.findall(r"resumed at sample \d+ \(step (\d+)", jobs.log()) == [saved, saved]
    assert "and is requeued" not in jobs.log()
    assert jobs.ends()[-1] == (number, 0)
    taken = events.steps_by_rank(jobs.folder / "run")
    assert sorted(taken) == [("step", step) for step in range(1, 22)]
    shares = sorted(tuple(rank["share"]) for ranks in taken.values() for rank in ranks.values())
    assert [end for _, end in shares[:-1]] == [begin for begin, _ in shares[1:]]
    assert (shares[0][0], shares[-1][1]) == (0, 3 * 101)


LATE = """
import os, signal, time

def save(*_):
    print("saving", flush=True)
    time.sleep(1)
    os._exit(75)

signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGTERM, save)
while "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(0.2)
"""


@pytest.mark.long
def test_a_save_after_the_time_limit_counts_too(jobs: Jobs) -> None:
    """Slurm gives a job a few seconds from SIGTERM to SIGKILL, and calls it timed out."""
    (jobs.folder / "late.py").write_text(LATE)
    jobs.submit("--time", "1", "-n", "2", "late.py")
    jobs.wait_for_codes(75, 0)
    assert "DUE TO TIME LIMIT" in jobs.log()


@pytest.mark.long
@pytest.mark.parametrize("command", ["scancel", "shoal cancel"])
def test_a_job_that_is_cancelled_has_saved_and_does_not_come_back(command: str, jobs: Jobs) -> None:
    number = jobs.submit("-n", "2", "train.py", "--", "2", "2", "run")
    jobs.wait_for_step(2)
    if command == "scancel":  # to which ranks save as on any SIGTERM
        jobs.command("scancel", number)
        jobs.wait(jobs.gone)
    else:
        jobs.shoal("cancel", "run")
        jobs.wait(jobs.gone)
        jobs.wait_for_codes(75)
        assert "has saved and is cancelled" in jobs.log()
        assert "saved, to be resumed" in jobs.shoal("status", "run")
    assert "and is requeued" not in jobs.log()
    assert list((jobs.folder / "run/checkpoints").glob("step-*"))


@pytest.mark.long
def test_a_chain_goes_on_and_ends_early(jobs: Jobs, alone: list[float]) -> None:
    first = int(jobs.submit("--chain", "4", "-n", "2", "train.py", "--", "2", "2", "run"))
    jobs.wait_for_step(2)
    jobs.command("scancel", "--signal=USR1", str(first))
    jobs.wait(jobs.gone)
    assert jobs.ends() == [(str(first), 75), (str(first + 1), 0)]
    assert trained(jobs.log()) == [alone]


def test_a_rank_that_fails_ends_the_job(jobs: Jobs) -> None:
    """Killed or raising: the others end within seconds, and it is no preemption."""
    (jobs.folder / "fails.py").write_text(
        "import os, signal, time\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1000)\n"
    )
    jobs.submit("--nodes", "2", "-n", "2", "fails.py")
    jobs.wait_for_codes(137)
    jobs.wait(jobs.gone)


@pytest.mark.long
def test_the_log_of_a_failure_ends_with_its_reason_also_after_a_restart(jobs: Jobs) -> None:
    (jobs.folder / "raises.py").write_text(
        "import torch, shoal\n"
        "with shoal.init() as world:\n"
        "    if world.rank == 1:\n"
        "        raise ValueError(f'attempt {world.placement.attempt}')\n"
        "    world.all_reduce(torch.ones(()))\n"
    )
    jobs.submit("--nodes", "2", "--restarts", "1", "raises.py")
    jobs.wait_for_codes(1, 1)
    jobs.wait(jobs.gone)
    *_, reason, place = jobs.log().splitlines()
    assert reason == "ValueError: attempt 1", jobs.log()
    assert re.match(r"where: rank 1 of 2 on node\d\d, .*raises.py:4", place)
    assert place in jobs.shoal("status", "run").replace("\n", " ").replace("  ", " ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        # The batch script is told, and tells the ranks.
        ("--site=mpirun.openmpi", ["--batch", "--signal=USR1"]),
        ("--site=mpirun.mpich", ["--batch", "--signal=USR1"]),
        # Its own exit code is another; that the ranks have saved stands in the run's record.
        ("--launcher=torchrun", ["--signal=TERM"]),
    ],
)
def test_other_launchers_pass_it_on(
    launcher: str, told: list[str], jobs: Jobs, alone: list[float]
) -> None:
    sites = jobs.folder / "config/shoal/sites"
    sites.mkdir(parents=True)
    _, _, name = launcher.partition("=")
    (sites / f"{name}.toml").write_text(f"launcher = 'mpirun'\nmpirun = ['{name}']\n")
    number = jobs.submit(launcher, "--nodes=2", "-n", "4", "train.py", "--", "4", "2", "run")
    jobs.wait_for_step(2)
    jobs.command("scancel", *told, number)
    jobs.wait_for_codes(75, 0)
    assert trained(jobs.log()) == [alone]


def test_a_drafted_site_keeps_limits_and_what_slurm_refuses_is_passed_on(jobs: Jobs) -> None:
    jobs.shoal("sites", "new", "mini")
    for arguments, told in (
        (["--site", "mini", "--gpus-per-node", "9"], "a node of main has 8 GPUs"),
        (["-p", "none"], "invalid partition"),
    ):
        done = jobs.try_shoal("submit", "--time", "10:00", *arguments, "train.py")
        assert done.returncode == 2, done.stdout
        assert told in done.stderr


def test_more_than_a_partition_allows_is_refused(jobs: Jobs) -> None:
    """Slurm itself accepts the job, and never starts it."""
    jobs.command("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=5")
    arguments = ("submit", "--run", "run", "--time", "10:00", "-p", "short")
    try:
        done = jobs.try_shoal(*arguments, "train.py")
        assert done.returncode == 2, done.stdout
        assert "the queue short ends jobs after 00:05:00" in done.stderr
        assert not (jobs.folder / "run").exists()
        jobs.shoal(*arguments, "--force", "train.py")
        assert "can never start: it requests more time" in jobs.shoal("status", "run")
    finally:
        jobs.command("scancel", "--partition=short")
        jobs.wait(jobs.gone)
        jobs.command("scontrol", "delete", "PartitionName=short")


SHORT = """
import os, sys
import torch, shoal

with shoal.init() as world:
    job = int(sys.argv[1])
    for _ in range(20):
        total = world.all_reduce(torch.full((1000,), float(job)))
    assert bool((total == world.size * job).all()), total
    assert world.gather(job) == [job] * world.size
    world.print(f"job {job}, {world.size} ranks")
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_forty_jobs_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """FAILURES 16: with hardly enough ports, none clashes, none hears another job, nothing is left."""
    (tmp_path / "short.py").write_text(SHORT)
    lines = [
        f"sbatch -J j{job} -o log-{job} {'-N2 -n3' if job % 2 else '-N1 -n2'} "
        f"--wrap 'srun {sys.executable} short.py {job}'"
        for job in range(40)
    ]
    ports = {"SHOAL_PORTS": "17501-17508"}
    done = cluster.run(["bash", "-ec", "\n".join(lines)], folder=tmp_path, variables=ports)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not cluster.run(["squeue", "-h"]).stdout, timeout=500)
    for job in range(40):
        said = (tmp_path / f"log-{job}").read_text()
        assert said.splitlines()[-1] == f"job {job}, {3 if job % 2 else 2} ranks", said
    assert not [node for node in cluster.nodes if cluster.running(node, "short.py")]
