"""Slowdowns that were planted, alone and two at once, are blamed on whom and what they are owed to.

Three ranks on three nodes train; what their events say is judged as `shoal report` does it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from shoal.tools.report import BottleneckReport, find_bottleneck, read_history

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.realtime, pytest.mark.timeout(400)]

# The delays are asleep, so that the ranks do not slow each other down.
TRAIN = """
import os, sys, time
import torch, shoal
from torch import nn
from torch.utils.data import Dataset

causes = sys.argv[1].split("+")

class Samples(Dataset):
    def __init__(self, slow):
        self.slow = slow
        self.inputs = torch.randn(3000, 256)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        if self.slow:
            time.sleep(0.015)
        return self.inputs[index]

class Net(nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.slow = slow
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    def forward(self, inputs):
        if self.slow:
            time.sleep(0.06)
        return self.layers(inputs)

def loss(output, batch):
    return (output - batch).square().sum(), output.numel()

with shoal.init(seed=1) as world:
    if "disk" in causes and world.rank == 0:
        synced = os.fsync
        os.fsync = lambda file: (time.sleep(0.25), synced(file))[1]
    model = shoal.parallelize(Net("compute" in causes and world.rank == 2), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch))
    data = shoal.Loader(Samples("data" in causes and world.rank == 1), world, batch_size=12)
    with shoal.Run("run", step, data, trackers=()) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick(every=5)
            if step.number == 40:
                break
"""

BLAMED = {"data": (1, "wait"), "compute": (2, "forward")}
SHARES = {"data": "wait", "compute": "forward", "link": "communication", "disk": "checkpoint"}
PAIRS = ["+".join(pair) for pair in combinations(SHARES, 2)]
COVER = ("link",)


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.network.rate(None)
    cluster.run(["scancel", "--signal=KILL", "--user=root"])
    cluster.wait_idle()


def verdict(cluster: Cluster, folder: Path, causes: str) -> BottleneckReport:
    """Of a run with these causes planted."""
    (folder / "train.py").write_text(TRAIN)
    if "link" in causes:
        cluster.network.rate("150mbit")
    done = cluster.run(
        ["srun", "-N3", "-n3", "--ntasks-per-node=1", sys.executable, "train.py", causes], folder=folder
    )
    assert done.returncode == 0, done.stderr
    return find_bottleneck(read_history(folder / "run"))


@pytest.mark.parametrize(
    "causes",
    [
        pytest.param(causes, marks=[] if causes in COVER else pytest.mark.long)
        for causes in (*SHARES, *PAIRS)
    ],
)
def test_what_was_planted_is_blamed(causes: str, cluster: Cluster, tmp_path: Path) -> None:
    found = verdict(cluster, tmp_path, causes)
    planted = causes.split("+")
    said = (found.sentence, found.shares)
    blamed = {(each.rank, each.part) for each in found.stragglers if each.part in ("wait", "forward")}
    assert blamed == {BLAMED[cause] for cause in planted if cause in BLAMED}, said
    for each in found.stragglers:
        assert each.host is not None
        assert each.host.startswith("node0")
    lost = {part: share for part, share in found.shares.items() if part != "computing"}
    largest = sorted(lost, key=lost.__getitem__, reverse=True)[: len(planted)]
    expected = {SHARES[cause] for cause in planted}
    if planted == ["data", "compute"]:  # each waits for the slower one, which costs the most
        assert largest[0] in expected, said
    else:
        assert {*largest} == expected, said
    assert found.efficient is not None
    assert found.efficient < 0.7, said
