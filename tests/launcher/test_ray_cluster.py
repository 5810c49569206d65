"""`shoal submit` on a real cluster of Ray: a node is killed and another one comes, and `shoal cancel`.

All raylets are on this machine, and need Ray's token. Ray's processes end with the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ranks import free_port
from shoal.tools.report.coverage import coverage

pytestmark = [
    pytest.mark.processes,
    pytest.mark.peers,
    pytest.mark.timeout(900),
    # Ray reads the variables of the fixture when it is imported.
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

directory = sys.argv[1]
with shoal.init(seed=1, device="cpu") as world:
    inputs = torch.randn(41, 5)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 1)
    model = shoal.parallelize(nn.Sequential(*layers), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss))
    data = shoal.Loader((inputs, inputs.sum(1, keepdim=True)), world, batch_size=12)
    with shoal.Run(directory, step, data) as run:
        first, told, saves = run.restore() is None, [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (told.append(1), saves(*given)))
        for batch in data.epochs(4):
            step(batch)
            run.tick(every=3)
            # The first attempt stays here until it is killed or told to end.
            if world.size == 2 and first and step.number == 5:
                Path(directory, f"stays-{world.rank}").write_text(os.environ["RAY_RAYLET_PID"])
                while not told:
                    time.sleep(0.05)
                time.sleep(0.3)
        run.save()
    if world.rank == 0:
        torch.save(list(model.parameters()), f"{directory}/parameters.pt")
"""
READY = ("ray", "job", "submit", "--no-wait", "--", "true")
SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, and two nodes with one."""
    port = free_port()
    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as place, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(20).hex(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": place,
            "RAY_worker_niceness": "0",  # on a busy machine, workers would wait for minutes
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        board = {
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": port,
            # Without an own port, only one cluster on a machine has an agent for jobs.
            "dashboard_agent_listen_port": free_port(),
        }
        found = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, **board})
        for _ in range(2):
            add_node(found)
        patch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{port}")
        try:
            while subprocess.run(READY, check=False).returncode:
                threading.Event().wait(0.5)  # until Ray has an agent for jobs
            yield found
        finally:
            found.shutdown()


class Submitted:
    """A folder with train.py, and its job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "train.py").write_text(TRAIN)
        site = folder / "config/shoal/sites/lab.toml"
        site.parent.mkdir(parents=True)
        site.write_text('scheduler = "ray"\n')

    def shoal(self, *arguments: str) -> str:
        home = str(self.folder / "config")
        variables = {"XDG_CONFIG_HOME": home, "XDG_STATE_HOME": home, "SHOAL_SITE": "lab"}
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *arguments],
            cwd=self.folder,
            env={**os.environ, **variables, "COLUMNS": "300"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self) -> None:
        given = ("--run", "run", "--time", "20:00", "--nodes", "2", "train.py")
        self.shoal("submit", *given, "--", "run")

    def ended(self) -> str:
        """Wait until the job has ended, and return its state."""
        while re.search("running|pending", found := self.shoal("status", "run")):
            threading.Event().wait(2)
        return found

    def check(self) -> None:
        """The parameters are those of one process, and each sample was used once."""
        command = [sys.executable, "train.py", "alone"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        one = torch.load(self.folder / "alone/parameters.pt")
        for mine, other in zip(torch.load(self.run / "parameters.pt"), one, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        seen = coverage(self.run)
        assert (seen.end, seen.exact) == (4 * 41, True)


@pytest.fixture
def job(cluster: Any, tmp_path: Path) -> Submitted:
    submitted = Submitted(tmp_path)
    submitted.submit()
    while len(list(submitted.run.glob("stays-*"))) < 2:
        threading.Event().wait(0.5)
    return submitted


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_is_killed_and_another_one_comes(rank: int, job: Submitted, cluster: Any) -> None:
    pid = int((job.run / f"stays-{rank}").read_text())
    [node] = [each for each in cluster.list_all_nodes() if raylet(each) == pid]
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster)
    assert "succeeded" in job.ended(), job.shoal("logs", "run")
    assert "all nodes start again" in job.shoal("logs", "run")
    job.check()


def test_cancel_saves_and_a_second_job_resumes(job: Submitted) -> None:
    job.shoal("cancel", "run")
    assert "submit it again to resume" in job.ended(), job.shoal("logs", "run")
    job.submit()
    assert "succeeded" in job.ended(), job.shoal("logs", "run")
    job.check()


def raylet(node: Any) -> int:
    [found] = node.all_processes["raylet"]
    return int(found.process.pid)


def add_node(cluster: Any) -> None:
    """Add a node. Ray gives a raylet 30 s to start, which is not enough on a busy machine."""
    before = len(cluster.list_all_nodes())
    while len(cluster.list_all_nodes()) == before:
        with suppress(Exception):
            cluster.add_node(**SMALL)
