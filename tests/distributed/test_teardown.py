"""A rank that fails reports first, aborts its process groups and ends, whatever its backend waits for.

No test has NCCL. Its destroy, which waits for collectives that other ranks never join, is played by one
that waits for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from helpers.commands import GONE_WITHIN, Command, wait_for
from helpers.ranks import free_port

pytestmark = pytest.mark.processes

BEGIN = """
import sys, threading
import torch, torch.distributed as dist
import shoal
from shoal.distributed import teardown
from torch.distributed import distributed_c10d

def wait_for_ever(*_):
    threading.Event().wait()

dist.destroy_process_group = wait_for_ever
"""

TRAINING = """
class Model(torch.nn.Linear):
    def forward(self, given):
        if world.rank == 1 and step.number == 2:
            raise ValueError("a bad sample")
        return super().forward(given)

def loss(output, batch):
    return output.sum(), len(output)

with shoal.init() as world:
    model = shoal.parallelize(Model(2, 2), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    for batch in shoal.Loader((torch.ones(99, 2),), world, batch_size=9).epochs(1):
        step(batch)
"""

ABORT_HANGS = """
distributed_c10d._abort_process_group = wait_for_ever
teardown.GIVE_UP_SECONDS = LIMIT
"""

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    commands: list[Command] = []

    def begin(script: str, *launcher: str) -> Command:
        (tmp_path / "script.py").write_text(BEGIN + script)
        commands.append(Command([sys.executable, *launcher, "script.py"], tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "shoal", "run", "-n", "2"),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["shoal run", "torchrun"],
)
def test_a_rank_that_fails_in_forward_is_reported_while_others_are_in_a_collective(
    start: Start, launcher: tuple[str, ...]
) -> None:
    run = start(TRAINING, *launcher)
    ended = run.end()
    assert ended.code == 1
    assert "ValueError: a bad sample" in ended.err
    if "shoal" in launcher:
        assert ended.err.splitlines()[-1].startswith("where: rank 1 of 2 on ")
    wait_for(lambda: not run.members(), GONE_WITHIN)


class ByHand:
    """Two ranks of a script that Python runs, without a launcher."""

    def __init__(self, folder: Path, script: str) -> None:
        path = folder / "script.py"
        path.write_text(script)
        port = str(free_port())
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(path)],
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
            for rank in range(2)
        ]

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def end(self) -> tuple[int, str]:
        """The exit code and the errors of rank 1."""
        _, errors = self.ranks[1].communicate(timeout=120)
        return self.ranks[1].returncode, errors


def script(body: str, *, give_up: float) -> str:
    return BEGIN + ABORT_HANGS.replace("LIMIT", str(give_up)) + body


ALONE = """
with shoal.init() as world:
    if world.rank == 1:
        LEAVE
    wait_for_ever()
"""


@pytest.mark.full
def test_the_traceback_comes_before_the_groups_have_ended(tmp_path: Path) -> None:
    """Their end takes longer than this test waits for anything."""
    body = ALONE.replace("LEAVE", 'raise ValueError("boom")')
    with ByHand(tmp_path, script(body, give_up=10_000)) as run:
        read_until(run.ranks[1].stderr, "ValueError: boom")
        assert run.ranks[1].poll() is None


def read_until(stream: IO[str] | None, text: str) -> None:
    assert stream is not None
    lines: list[str] = []
    while text not in "".join(lines):
        lines.append(stream.readline())
        assert lines[-1], f"the end of {''.join(lines)}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("leave", "code", "told"),
    [
        ('raise ValueError("boom")', 1, "ValueError: boom"),
        pytest.param("sys.exit(7)", 7, "", marks=pytest.mark.full),
        pytest.param("raise KeyboardInterrupt", 128 + signal.SIGINT, "", marks=pytest.mark.full),
    ],
)
def test_a_rank_whose_groups_do_not_end_ends_without_them(
    tmp_path: Path, leave: str, code: int, told: str
) -> None:
    with ByHand(tmp_path, script(ALONE.replace("LEAVE", leave), give_up=1.5)) as run:
        found, errors = run.end()
    assert (found, told in errors) == (code, True), errors


BOTH_END = """
with shoal.init() as world:
    world.barrier()
"""
WITHOUT_WITH = """
world = shoal.init()
world.barrier()
END
"""


@pytest.mark.full
def test_a_clean_end_that_takes_too_long_keeps_its_exit_code(tmp_path: Path) -> None:
    with ByHand(tmp_path, script(BOTH_END, give_up=0.5)) as run:
        assert run.end() == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.long), 'raise ValueError("boom")'])
def test_a_world_that_python_closes_at_its_exit_ends_too(tmp_path: Path, end: str) -> None:
    body = WITHOUT_WITH.replace("END", end)
    with ByHand(tmp_path, script(body, give_up=0.5)) as run:
        code, errors = run.end()
    assert code == 1
    assert "leave_groups" in errors  # the stack of the main thread
    assert ("ValueError: boom" in errors) == bool(end)


@pytest.mark.full
def test_groups_are_aborted_after_a_failure_only(
    tmp_path: Path,
) -> None:
    notes = """
called = []
dist.destroy_process_group = lambda: called.append("destroy")
distributed_c10d._abort_process_group = lambda: called.append("abort")
for error in (None, SystemExit(), SystemExit(0), SystemExit(1), ValueError(), KeyboardInterrupt()):
    for exiting in (False, True):
        teardown.leave_groups(error, exiting=exiting)
assert called == ["destroy"] * 6 + ["abort"] * 6, called
"""
    path = tmp_path / "notes.py"
    path.write_text(BEGIN + notes)
    subprocess.run([sys.executable, str(path)], check=True)
