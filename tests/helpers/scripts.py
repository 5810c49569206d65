"""A script on several ranks, started as users start one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.commands import Command
from helpers.ranks import free_port

LAUNCHERS = {
    "alone": [sys.executable],
    "shoal run": [sys.executable, "-m", "shoal", "run", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}


AGREEING = """
import os, signal, sys, time
import torch, shoal
from torch import nn

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

def main():
    size, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    torch.set_default_dtype(torch.float64)
    with shoal.init(seed=1) as world:
        assert world.size == size, world.placement.reason
        world.print(f"attempt {world.placement.attempt} with {sys.argv[4:]}")
        inputs = torch.randn(101, 5)
        targets = inputs.sum(1, keepdim=True)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 1))
        model = shoal.parallelize(model, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        data = shoal.Loader((inputs, targets), world, batch_size=16)
        with shoal.Run(folder, step, data) as run:
            first = run.restore() is None
            for batch in data.epochs(3):
                step(batch)
                run.tick()
                if first:
                    time.sleep(seconds)
            run.save()
        result = shoal.evaluate(step, (inputs, targets))
        values = [value for each in model.parameters() for value in each.flatten().tolist()]
        world.print("trained", result["loss"], *values)

main()
"""
"""It reaches the same parameters however many ranks train: SIZE, SECONDS per step before the first
restart, FOLDER.
"""


def trained(text: str) -> list[list[float]]:
    """The loss and the parameters at the end of each training in what was printed."""
    return [[*map(float, line.split())] for line in re.findall("^trained (.*)$", text, re.MULTILINE)]


def trained_alone(folder: Path) -> list[float]:
    """What one process reaches; others are equal to it if no number differs by more than 1e-12."""
    (folder / "train.py").write_text(AGREEING)
    command = [sys.executable, "train.py", "1", "0", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return pytest.approx(trained(done.stdout)[0], rel=0, abs=1e-12)  # type: ignore[return-value]


class Script(Command):
    """Ranks of a script that is written into a folder.

    The launcher is one of the table, a command, or "hand": a shell starts each rank with the
    variables of env:// and those of `own`, in a folder of the script's, and prints how it ended.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        launcher: str | Sequence[str] = "shoal run",
        *arguments: str,
        size: int = 2,
        own: str = "LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$WORLD_SIZE",
        place: str = ".",
    ) -> None:
        self.script = folder / "script.py"
        if not self.script.exists() or self.script.read_text() != text:  # others may be starting it
            self.script.write_text(text)
        command = [*launcher, "script.py", *arguments]
        if launcher == "hand":
            ranks = " ".join(map(str, range(size)))
            rank = f'RANK=$rank {own} {sys.executable} script.py; echo "rank $rank ended with $?"'
            address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
            begin = f"export WORLD_SIZE={size} {address}; for rank in {ranks}"
            command = ["sh", "-c", f"{begin}; do (cd {place}; {rank}) & done; wait"]
        elif isinstance(launcher, str):
            number = [] if launcher == "alone" else [str(size)]
            command = [*LAUNCHERS[launcher], *number, "script.py", *arguments]
        super().__init__(command, folder)

    def at(self, marked: str) -> str:
        """The line of the script that holds a text, as reports name it."""
        lines = self.script.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, start=1) if marked in line)
        return f"{self.script}:{number}"
