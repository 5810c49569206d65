"""A script on several ranks, started as users start one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.commands import Command
from helpers.ranks import free_port

LAUNCHERS = {
    "alone": [sys.executable],
    "shoal run": [sys.executable, "-m", "shoal", "run", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}


AGREEING = """
import sys, time
import torch, shoal
from torch import nn

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

def main():
    size, seconds = int(sys.argv[1]), float(sys.argv[2])
    torch.set_default_dtype(torch.float64)
    with shoal.init(seed=1) as world:
        assert world.size == size, world.placement.reason
        inputs = torch.randn(101, 5)
        targets = inputs.sum(1, keepdim=True)
        model = shoal.parallelize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        data = shoal.Loader((inputs, targets), world, batch_size=16)
        with shoal.Run(sys.argv[3], step, data) as run:
            run.restore()
            for batch in data.epochs(3):
                step(batch)
                run.tick(every=1)
                if world.placement.attempt == 0:
                    time.sleep(seconds)
        result = shoal.evaluate(step, (inputs, targets))
        world.print(f"loss {result['loss']:.9f} attempt {world.placement.attempt}")

main()
"""
"""It prints the same loss however many ranks train: SIZE, SECONDS per step, and a folder."""


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
