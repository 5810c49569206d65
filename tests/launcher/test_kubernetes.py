"""`shoal submit` on a stand-in for Kubernetes: pods that are evicted, killed, suspended and late."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.cluster.kubernetes import JobSet, Kubernetes
from helpers.cluster.nodes import missing_programs
from shoal.tools.report.coverage import coverage

pytestmark = [pytest.mark.processes, pytest.mark.system, pytest.mark.timeout(900)]

TRAIN = """
import signal, sys, time
from pathlib import Path
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

directory, mode = sys.argv[1:3]
with shoal.init(seed=1, timeout=60) as world:
    world.print(f"begins with {world.size} ranks, {sys.argv[3:]}")
    inputs = torch.randn(41, 5)
    targets = inputs.sum(1, keepdim=True)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 1)
    model = shoal.parallelize(nn.Sequential(*layers), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = shoal.Loader((inputs, targets), world, batch_size=12)
    with shoal.Run(directory, step, data) as run:
        first = run.restore() is None
        told, saves = Path(directory, "told"), signal.getsignal(signal.SIGTERM)

        def tell(*given):
            told.touch()
            saves(*given)

        signal.signal(signal.SIGTERM, tell)
        for batch in data.epochs(4):
            step(batch)
            run.tick(every=3)
            # The first attempt stays here until one of its ranks has been told to end.
            while first and step.number == 5 and mode != "go":
                Path(directory, f"stays-{world.rank}").touch()
                time.sleep(0.05)
                if told.exists() and mode == "hold":
                    break
            time.sleep(0.3 * (first and told.exists()))
        run.save()
    if world.rank == 0:
        torch.save(list(model.parameters()), f"{directory}/parameters.pt")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The parameters that one process reaches."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "train.py", "run", "go"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    found: list[torch.Tensor] = torch.load(folder / "run/parameters.pt")
    return found


class Submitted:
    """A volume with train.py, on a machine with kubectl; and its job, once it is submitted."""

    def __init__(self, cluster: Kubernetes, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.run = folder / "run"
        (folder / "train.py").write_text(TRAIN)
        site = folder / "config/shoal/sites/lab.toml"
        site.parent.mkdir(parents=True)
        site.write_text(f'scheduler = "kubernetes"\nimage = "train"\nvolumes = ["data:{folder}"]\n')

    def shoal(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "shoal", *arguments]
        home = str(self.folder / "config")
        variables = {"XDG_CONFIG_HOME": home, "XDG_STATE_HOME": home, "SHOAL_SITE": "lab"}
        done = self.cluster.run(command, folder=self.folder, COLUMNS="300", **variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *options: str, script: str = "train.py", mode: str = "hold") -> JobSet:
        given = ("--run", "run", "--time", "10:00", "--nodes", "2", *options, script)
        said = self.shoal("submit", *given, "--", "run", mode, "$(HOME)", "a b")
        [job] = re.findall(r"^job (\S+):", said, re.MULTILINE)
        self.cluster.look()
        return self.cluster.job_set(job)

    def wait_for_ranks(self) -> None:
        """Wait until both ranks have come to where they stay."""
        self.cluster.wait(lambda: len(list(self.run.glob("stays-*"))) == 2)

    def wait_for(self, job: JobSet, kind: str) -> None:
        self.cluster.wait(lambda: job.condition is not None)
        assert job.condition is not None
        assert job.condition[0] == kind, self.cluster.output()

    def check(self, alone: list[torch.Tensor]) -> None:
        """The numbers are those of one process, and each sample was used once."""
        found = torch.load(self.run / "parameters.pt")
        for mine, other in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        seen = coverage(self.run)
        assert (seen.end, seen.exact) == (4 * 41, True)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Submitted]:
    if lacking := missing_programs():
        pytest.skip(lacking)
    (tmp_path / "volume").mkdir()
    with Kubernetes(tmp_path / "cluster") as cluster:
        yield Submitted(cluster, tmp_path / "volume")


def test_the_same_parameters_as_one_process(lab: Submitted, alone: list[torch.Tensor]) -> None:
    job = lab.submit("-n", "4", mode="go")
    lab.wait_for(job, "Completed")
    lab.check(alone)
    assert sorted(job.codes) == [(0, 0), (1, 0)]
    assert "begins with 4 ranks, ['$(HOME)', 'a b']" in lab.shoal("logs", "run")
    assert "completed" in lab.shoal("status", "run")


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_pod_is_evicted(index: int, lab: Submitted, alone: list[torch.Tensor]) -> None:
    """All pods save; those that have ended are replaced, at other addresses, without a count."""
    job = lab.submit()
    lab.wait_for_ranks()
    assert "running" in lab.shoal("status", "run")
    pod = job.running(index)
    pod.disrupted = True
    pod.terminate(job.grace)
    lab.wait_for(job, "Completed")
    assert (index, 75) in job.codes
    assert {code for _, code in job.codes} == {0, 75}
    assert job.restarts == 0
    lab.check(alone)


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_pod_is_killed(index: int, lab: Submitted, alone: list[torch.Tensor]) -> None:
    """It counts as a failure, after which all pods start again."""
    job = lab.submit("--restarts", "1")
    lab.wait_for_ranks()
    job.running(index).kill()
    lab.wait_for(job, "Completed")
    assert (index, 137) in job.codes
    assert job.restarts == 1
    lab.check(alone)


@pytest.mark.parametrize(("index", "restarts"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.long)])
def test_a_node_is_lost(index: int, restarts: int, lab: Submitted, alone: list[torch.Tensor]) -> None:
    """Only its pod is replaced; if it was the first one, the others can't go on, which counts."""
    job = lab.submit("--restarts", str(restarts))
    lab.wait_for_ranks()
    pod = job.running(index)
    pod.disrupted = True
    lab.cluster.network.cut(pod.host)
    pod.kill()
    lab.wait_for(job, "Completed")
    assert job.codes[0] == (index, 137)
    assert job.restarts == restarts
    if index:
        assert sorted(job.codes[1:]) == [(0, 0), (1, 0)]
    lab.check(alone)


def test_a_queue_takes_the_nodes_away_for_a_time(lab: Submitted, alone: list[torch.Tensor]) -> None:
    job = lab.submit()
    lab.wait_for_ranks()
    job.suspended = True
    lab.cluster.wait(lambda: not job.pods)
    assert sorted(job.codes) == [(0, 75), (1, 75)], lab.cluster.output()
    assert "suspended" in lab.shoal("status", "run")
    assert "has not ended" in lab.shoal("submit", "--run", "run", "--time", "9", "train.py", code=2)
    job.suspended = False
    lab.wait_for(job, "Completed")
    lab.check(alone)


def test_a_job_that_is_cancelled_has_saved(lab: Submitted, alone: list[torch.Tensor]) -> None:
    """The same command again resumes it."""
    job = lab.submit()
    lab.wait_for_ranks()
    assert "saves a checkpoint and ends" in lab.shoal("cancel", "run")
    lab.cluster.wait(lambda: job.gone)
    assert sorted(job.codes) == [(0, 75), (1, 75)]
    assert "gone" in lab.shoal("status", "run")
    assert "had ended before" in lab.shoal("cancel", "--now", "run")
    lab.wait_for(lab.submit(), "Completed")
    lab.check(alone)


@pytest.mark.long
def test_a_job_that_is_cancelled_at_once(lab: Submitted) -> None:
    job = lab.submit(mode="stuck")
    lab.wait_for_ranks()
    assert "cancelled" in lab.shoal("cancel", "--now", "run")
    lab.cluster.wait(lambda: job.gone)
    assert {code for _, code in job.codes} == {137}


@pytest.mark.long
def test_the_time_limit_ends_a_job_that_has_saved(lab: Submitted, alone: list[torch.Tensor]) -> None:
    job = lab.submit("--restarts", "3")
    lab.wait_for_ranks()
    lab.cluster.passed = 600.0 - job.grace
    lab.wait_for(job, "Failed")
    assert (sorted(job.codes), job.restarts) == ([(0, 75), (1, 75)], 0)
    assert "DeadlineExceeded" in lab.shoal("status", "run")
    lab.wait_for(lab.submit(), "Completed")
    lab.check(alone)


def test_a_rank_that_fails(lab: Submitted) -> None:
    (lab.folder / "raises.py").write_text(
        "import torch, shoal\n"
        "with shoal.init() as world:\n"
        "    if world.rank == 1:\n"
        "        raise ValueError('no')\n"
        "    world.all_reduce(torch.ones(()))\n"
    )
    job = lab.submit("--restarts", "1", script="raises.py")
    lab.wait_for(job, "Failed")
    assert job.restarts == 1
    assert (1, 1) in job.codes
    assert "BackoffLimitExceeded" in lab.shoal("status", "run")
    assert "ValueError: no" in lab.shoal("logs", "run")
