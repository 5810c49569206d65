"""Jobs of `shoal submit` on a cluster on this machine, and the training that they run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.cluster.nodes import NodeCluster
from helpers.commands import wait_for
from shoal.telemetry import events

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

TRAIN = """
import os, signal, sys, time
import torch, shoal
from torch import nn

torch.set_default_dtype(torch.float64)

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

directory, size, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with shoal.init(seed=1) as world:
    assert world.size == size, world.placement.reason
    world.print(f"begins with {world.size} ranks, {sys.argv[4:]}")
    inputs = torch.randn(101, 5)
    targets = inputs.sum(1, keepdim=True)
    model = shoal.parallelize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
    data = shoal.Loader((inputs, targets), world, batch_size=16)
    with shoal.Run(directory, step, data) as run:
        first = run.restore() is None
        for batch in data.epochs(3):
            step(batch)
            run.tick()
            if first:
                time.sleep(seconds)
        run.save()
    result = shoal.evaluate(step, (inputs, targets))
    world.print(f"loss {result['loss']:.9f}")
"""


def loss_of_one_process(folder: Path) -> str:
    """What one process reaches."""
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "train.py", "run", "1", "0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return losses(done.stdout)[0]


def losses(text: str) -> list[str]:
    """The losses in the output of a training."""
    return re.findall(r"^loss (\d+\.\d+)$", text, re.MULTILINE)


class Jobs:
    """A directory with train.py, on the login node of a cluster."""

    def __init__(self, cluster: NodeCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {"XDG_CONFIG_HOME": str(folder / "config"), **AS_ROOT}
        (folder / "train.py").write_text(TRAIN)

    def shoal(self, *arguments: str) -> str:
        done = self.try_shoal(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", *arguments]
        return self.cluster.run(command, folder=self.folder, variables=self.variables)

    def submit(self, *arguments: str) -> str:
        """Submit with run directory `run`; the number of the job, of a chain the first."""
        said = self.shoal("submit", "--run", "run", "--time", "10:00", *arguments)
        return str(re.findall(r"^job (\d+)", said)[0])

    def command(self, *command: str) -> str:
        """Run a command of the scheduler."""
        done = self.cluster.run(command, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self, element: str = "") -> str:
        path = self.folder / f"run/jobs/1/log{element}.txt"
        return path.read_text() if path.exists() else ""

    def ends(self) -> list[tuple[str, int]]:
        """The job and the exit code of each end of one."""
        path = self.folder / "run/jobs/1/ends"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], int(line.split()[2])) for line in lines]

    def wait(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        def told() -> str:
            return f"{self.log()}\n{self.cluster.queue()}"

        wait_for(condition, timeout, every=0.1, told=told)

    def wait_for_step(self, number: int, run: str = "run") -> None:
        """Until a step is recorded, which training waits after."""
        path = self.folder / run / "events/rank-0.jsonl"
        self.wait(lambda: path.exists() and number in (e.get("step") for e in events.read_events(path)))

    def wait_for_files(self, *names: str) -> None:
        self.wait(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_codes(self, *codes: int, timeout: float = 120) -> None:
        """Until the job has ended so often, each time with such an exit code."""
        self.wait(lambda: len(self.ends()) == len(codes), timeout)
        assert tuple(code for _, code in self.ends()) == codes, self.log()

    def gone(self) -> bool:
        return self.cluster.queue().strip() == ""
