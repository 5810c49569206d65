"""Strategies over torch RPC between hosts of their own: stages on three, a server and its workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(300)]

NODES = ("node01", "node02", "node03")

SERVED = """
import sys, time
from pathlib import Path
import torch, shoal

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

with shoal.init() as world:
    inputs = torch.randn(60, 4)
    samples = inputs, inputs.sum(1, keepdim=True)
    model = shoal.parallelize(torch.nn.Linear(4, 1), world, shoal.Hogwild(max_staleness=8))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.05), shoal.Task(loss))
    for batch in shoal.Loader(samples, world, batch_size=12).epochs(60):
        if step.number == 20:
            Path(f"there-{world.rank}").touch()
            while not Path("go on").exists():
                time.sleep(0.01)
        step(batch)
    print(f"{shoal.evaluate(step, samples)['loss']:.1e}", flush=True)
"""

STAGES = """
from pathlib import Path
import torch, shoal

def loss(output, batch):
    return output.square().sum(), len(output)

with shoal.init(layout="pipeline=3") as world:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    stages = {"a": ("0",), "b": ("1",), "c": ("2",)}
    model = shoal.parallelize(model, world, shoal.RPCPipeline(stages=stages))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    data = shoal.Loader((torch.ones(1000, 3),), world, batch_size=8, micro_batches=2)
    for batch in data.epochs(10**6):
        step(batch)
        if step.number == 5:
            Path(f"there-{world.rank}").touch()
"""


@pytest.fixture(autouse=True)
def debians_habit(cluster: Cluster) -> Iterator[None]:
    """Each host's own name is its loopback address, where torch's RPC would listen."""
    cluster.name_hosts(own="127.0.1.1")
    yield
    cluster.run(["scancel", "--signal=KILL", "--user=root"])
    cluster.wait_idle()


def srun(folder: Path, *arguments: str) -> list[str]:
    """A rank on each of the nodes, which ends the others only if Shoal does."""
    alone = [f"-w{','.join(NODES)}", "-n3", "--kill-on-bad-exit=0", "-o", f"{folder}/log"]
    return ["srun", *alone, sys.executable, *arguments]


class Ranks:
    """One on each of the nodes, in the middle of their training; `log` is what they have said."""

    def __init__(self, cluster: Cluster, folder: Path, text: str) -> None:
        self._cluster, self._folder = cluster, folder
        self._script = folder / "train.py"
        self._script.write_text(text)
        self._process = cluster.start(srun(folder, str(self._script)), folder=folder)
        wait_for(lambda: len(list(folder.glob("there-*"))) == len(NODES))

    def kill(self, number: int) -> None:
        """Kill the rank of that number."""
        (found,) = self._cluster.running(NODES[number], str(self._script))
        found.kill()

    def end(self) -> str:
        """What they have said when the last of them has ended."""
        running = self._cluster.running
        wait_for(lambda: not any(running(node, str(self._script)) for node in NODES))
        for node in NODES:
            self._cluster.network.mend(node)
        self._process.kill()  # it would wait for a host that could not tell it
        self._process.wait()
        return (self._folder / "log").read_text()


@pytest.mark.long
def test_stages_on_three_hosts_train_as_one_process_does(
    cluster: Cluster, tmp_path: Path, repository: Path
) -> None:
    script = str(repository / "examples/remote.py")
    small = ["--strings", "100", "--epochs", "2"]
    alone = subprocess.run(
        [sys.executable, script, *small], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    parts = ["--readers", "2", "--run", "parts"]
    done = cluster.run(srun(tmp_path, script, *small, *parts), folder=tmp_path)
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said
    assert alone.stdout.splitlines()[-1] in said.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", pytest.param("cut off", marks=pytest.mark.long)])
def test_workers_push_to_a_server_on_another_host_and_go_on_without_one(
    fault: str, cluster: Cluster, tmp_path: Path
) -> None:
    """One whose machine can't be reached is given the time that a step may take."""
    if fault == "killed":
        ranks = Ranks(cluster, tmp_path, SERVED)
        ranks.kill(2)
    else:
        ranks = Ranks(cluster, tmp_path, SERVED.replace("init()", "init(timeout=10)"))
        cluster.network.cut(NODES[2])
    (tmp_path / "go on").touch()
    said = ranks.end()
    losses = [float(line) for line in said.splitlines() if line[:1].isdigit()]
    assert len(losses) == 2, said
    assert max(losses) < 1e-3
    assert "rank 2 has ended; the other 2 continue without it" in said


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_a_stage_that_is_gone_is_named_on_the_other_hosts(
    fault: str, victim: int, cluster: Cluster, tmp_path: Path
) -> None:
    """Killed: long before a step would be too long; cut off: after that time. The last one drives."""
    if fault == "killed":
        ranks = Ranks(cluster, tmp_path, STAGES)
        ranks.kill(victim)
        assert f"rank {victim} on {NODES[victim]} is gone" in ranks.end()
    else:
        ranks = Ranks(cluster, tmp_path, STAGES.replace('3"', '3", timeout=10'))
        cluster.network.cut(NODES[victim])
        assert f"{NODES[victim]} can't be reached from" in ranks.end()
