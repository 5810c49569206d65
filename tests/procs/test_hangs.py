"""Ranks that wait for one that never comes: who is named, where, how soon, and what is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import GONE_WITHIN, Command, Ended, wait_for
from ranks import free_port

STEP_SECONDS = 4.0
HOST = socket.gethostname()

SCRIPT = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, shoal

here = Path(__file__).parent
event = threading.Event()

class Blocked(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank
    def __len__(self):
        return 999
    def __getitem__(self, index):
        if self.rank == 1:
            event.wait()  # the loader blocks
        return torch.ones(2)

def loss(output, batch):
    return output.square().sum(), len(output)

def steps(world, data, count):
    for number, batch in zip(range(count), data.epochs(99)):
        step(batch)

def ready():
    (here / f"ready{world.rank}.part").write_text(str(os.getpid()))
    (here / f"ready{world.rank}.part").rename(here / f"ready{world.rank}")

begun = time.monotonic()
with shoal.init(timeout=TIMEOUT, prepare_timeout=PREPARE) as world:
    rank, device = world.rank, world.device
    model = shoal.parallelize(torch.nn.Linear(2, 2), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    data = shoal.Loader((torch.ones(99, 2),), world, batch_size=9)
    steps(world, data, STEPS)
    ready()
BODY
"""


def indented(body: str) -> str:
    return textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")


class Hanging(Command):
    """Three ranks of the script with a body of its own, under some launcher."""

    def __init__(
        self, folder: Path, body: str, launcher: str, *, steps: int, prepare: float = 60.0
    ) -> None:
        text = SCRIPT.replace("TIMEOUT", str(STEP_SECONDS)).replace("PREPARE", str(prepare))
        self.script = folder / "script.py"
        self.script.write_text(text.replace("STEPS", str(steps)).replace("BODY", indented(body)))
        by_hand = (
            f"export WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}\n"
            f"for rank in 0 1 2; do RANK=$rank LOCAL_RANK=$rank {sys.executable} script.py & done\nwait"
        )
        commands = {
            "shoal run": [sys.executable, "-m", "shoal", "run", "-n", "3", "script.py"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "script.py"],
            "hand": ["sh", "-c", by_hand],
        }
        super().__init__(commands[launcher], folder)

    def at(self, marked: str) -> str:
        """The line of the script that holds a text, as reports name it."""
        lines = self.script.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, start=1) if marked in line)
        return f"{self.script}:{number}"

    def end_hung(self) -> tuple[float, Ended]:
        """Seconds from the moment in which all were ready to the end, and what is left."""
        self.wait_ready(3)
        begun = time.monotonic()
        ended = self.end()
        return time.monotonic() - begun, ended


Start = Callable[..., Hanging]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    commands: list[Hanging] = []

    def begin(body: str, launcher: str = "shoal run", *, steps: int = 4, **options: Any) -> Hanging:
        commands.append(Hanging(tmp_path, body, launcher, steps=steps, **options))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


def the_line(text: str) -> str:
    """The one line of a report that says it all."""
    (line,) = re.findall(r"^found: (.*)$", text, re.MULTILINE)
    return str(line)


def check_end(run: Hanging, seconds: float, ended: Ended) -> None:
    """In time, with the code of a hang, and nothing left."""
    assert STEP_SECONDS * 0.9 < seconds < STEP_SECONDS + 5, ended.err
    assert ended.code == 124, ended.err
    wait_for(lambda: not run.members(), GONE_WITHIN)


ASLEEP = """
    if rank == 1:
        event.wait()  # asleep
    world.barrier()  # awake
"""


def test_a_rank_that_does_not_arrive_is_named_with_its_line(start: Start) -> None:
    """FAILURES 18: rank 1 sleeps before a collective."""
    run = start(ASLEEP)
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    assert the_line(ended.err) == (
        f"rank 1 of 3 on {HOST} did not arrive: it is at {run.at('# asleep')} in <module>; "
        f"ranks 0 and 2 have waited {STEP_SECONDS:.0f} s in all_reduce of float32[] at {run.at('# awake')}"
    )
    *_, last = ended.err.splitlines()
    assert last == f"where: rank 1 of 3 on {HOST}, {run.at('# asleep')} (the other 2 were stopped)"
    (kept,) = re.findall(r"see (\S+),", ended.err)
    details = Path(kept).read_text()
    assert details.count("thread MainThread") == 3
    assert "all_reduce of float32[], not done" in details
