"""A slurmd is killed, a node is, a link is cut: who goes on, from where, and who must not any more."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster, missing
from helpers.commands import wait_for
from shoal.distributed.cluster_env import expand_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(300)]

# The first attempt stops in the middle, until it is told to go on, and then saves again.
TRAIN = """
import sys, time
from pathlib import Path
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

with shoal.init(seed=1) as world:
    inputs = torch.randn(101, 5)
    targets = inputs.sum(1, keepdim=True)
    model = shoal.parallelize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = shoal.Loader((inputs, targets), world, batch_size=16)
    with shoal.Run("run", step, data) as run:
        run.restore()
        for batch in data.epochs(2):
            step(batch)
            try:
                run.tick(every=1)
            except shoal.util.errors.CheckpointError as error:
                Path("refused").write_text(f"{world.placement.attempt} {error.found}")
                raise
            if step.number == 5 and world.placement.attempt == 0 and len(sys.argv) > 1:
                run.save()
                Path(f"stopped-{world.rank}").touch()
                while not Path("go on").exists():
                    time.sleep(0.1)
    result = shoal.evaluate(step, (inputs, targets))
    world.print(f"loss {result['loss']:.9f} attempt {world.placement.attempt}")
"""


LOSS = re.compile(r"^loss (\S+) attempt (\d)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job in a folder of its own, and the nodes that it was on when things went wrong."""

    folder: Path
    nodes: list[str]

    def is_done(self) -> bool:
        """Whether the second attempt has come to its end."""
        return "attempt 1" in self.log

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def submit(cluster: Cluster, folder: Path, nodes: int) -> str:
    """Submit a job, a rank for each node; its number."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    options = f"#SBATCH -N{nodes} -n{nodes} --exclusive --requeue --open-mode=append -o log"
    run = f"srun {sys.executable} {folder}/train.py stop"
    (folder / "job.sh").write_text(f"#!/bin/bash\n{options}\n{run}\n")
    return cluster.run(["sbatch", "--parsable", "job.sh"], folder=folder).stdout.strip()


def in_the_middle(cluster: Cluster, folder: Path, nodes: int, number: str) -> Job:
    """The job when all of its ranks are in the middle of their training."""
    wait_for(lambda: len(list(folder.glob("stopped-*"))) == nodes)
    listed = cluster.run(["scontrol", "show", "job", number]).stdout
    (names,) = re.findall(r"\bNodeList=(node\S+)", listed)
    return Job(folder=folder, nodes=expand_hosts(names))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, Job]]]:
    """Three jobs, each with a fault of its own, all put back into the queue and at their ends."""
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("faults")
    with Cluster(folder / "cluster", nodes=8, silence=5) as cluster:
        sizes = {"slurmd": 1, "link": 1, "node": 2}
        numbers = {name: submit(cluster, folder / name, size) for name, size in sizes.items()}
        jobs = {
            name: in_the_middle(cluster, folder / name, sizes[name], number)
            for name, number in numbers.items()
        }
        cluster.kill_slurmd(jobs["slurmd"].nodes[0])
        cluster.network.cut(jobs["link"].nodes[0])
        cluster.kill(jobs["node"].nodes[-1])
        for job in jobs.values():
            wait_for(job.is_done, timeout=120)
            (job.folder / "go on").touch()
        yield cluster, jobs


@pytest.fixture(scope="module")
def alone(jobs: tuple[Cluster, dict[str, Job]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The loss that one process reaches, which nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TRAIN)
    done = jobs[0].run([sys.executable, "train.py"], folder=folder)
    assert done.returncode == 0, done.stderr
    ((loss, _),) = LOSS.findall(done.stdout)
    return str(loss)


@pytest.mark.parametrize("fault", ["slurmd", "link", "node"])
def test_the_job_goes_on_elsewhere(
    fault: str, jobs: tuple[Cluster, dict[str, Job]], alone: str
) -> None:
    assert LOSS.findall(jobs[1][fault].log) == [(alone, "1")]


@pytest.mark.parametrize("fault", ["slurmd", "link"])
def test_ranks_that_live_on_unseen_change_no_checkpoint_any_more(
    fault: str, jobs: tuple[Cluster, dict[str, Job]]
) -> None:
    cluster, job = jobs[0], jobs[1][fault]
    wait_for((job.folder / "refused").exists)
    wait_for(lambda: not cluster.running(job.nodes[0], f"{job.folder}/train.py"))
    attempt, _, why = (job.folder / "refused").read_text().partition(" ")
    assert attempt == "0"
    assert re.search(r"attempt 2, process \d+ on node\d\d .* has taken over", why)


def test_nodes_come_back_and_nothing_is_left(jobs: tuple[Cluster, dict[str, Job]]) -> None:
    cluster, all_jobs = jobs
    dead, headless = all_jobs["node"].nodes[-1], all_jobs["slurmd"].nodes[0]
    cluster.network.mend(all_jobs["link"].nodes[0])
    cluster.revive(dead)
    cluster.revive_slurmd(headless)
    cluster.wait_idle(dead, headless)
    wait_for(lambda: not [node for node in cluster.nodes if cluster.running(node, "train.py")])
