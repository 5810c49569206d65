"""A rank that fails reports first, aborts its process groups and ends, whatever its backend waits for.

No test has NCCL. Its destroy, which waits for collectives that other ranks never join, is played by one
that waits for ever.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import IO

import pytest

from helpers.commands import GONE_WITHIN, wait_for
from helpers.scripts import Script

pytestmark = [pytest.mark.processes, pytest.mark.full]

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

Start = Callable[..., Script]


@pytest.mark.full(rows="all")
@pytest.mark.parametrize("launcher", ["shoal run", "torchrun"])
def test_a_rank_that_fails_in_forward_is_reported_while_others_are_in_a_collective(
    start: Start, launcher: str
) -> None:
    run = start(BEGIN + TRAINING, launcher)
    ended = run.end()
    assert ended.code == 1
    assert "ValueError: a bad sample" in ended.err
    assert "did not arrive" not in ended.err
    if launcher == "shoal run":
        assert ended.err.splitlines()[-1].startswith("where: rank 1 of 2 on ")
    wait_for(lambda: not run.members(), GONE_WITHIN)


def hanging(body: str, *, give_up: float) -> str:
    """A script whose process groups do not end either way."""
    limits = (
        f"distributed_c10d._abort_process_group = wait_for_ever\nteardown.GIVE_UP_SECONDS = {give_up}"
    )
    return f"{BEGIN}{limits}\n{body}"


ALONE = """
with shoal.init() as world:
    if world.rank == 1:
        LEAVE
    wait_for_ever()
"""


def read_until(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    lines: list[str] = []
    while text not in "".join(lines):
        lines.append(stream.readline())
        assert lines[-1], f"the end of {''.join(lines)}"
    return "".join(lines)


def end_of_rank_1(run: Script) -> tuple[int, str]:
    """Its exit code, and the errors of both ranks."""
    last = read_until(run.process.stdout, "rank 1 ended with").splitlines()[-1]
    run.clean_up()
    return int(last.split()[-1]), run.end().err


def test_the_traceback_comes_before_the_groups_have_ended(start: Start) -> None:
    """Their end takes longer than this test waits for anything."""
    body = ALONE.replace("LEAVE", 'raise ValueError("boom")  # here')
    run = start(hanging(body, give_up=10_000), "hand")
    read_until(run.process.stderr, "ValueError: boom")
    assert len(run.members()) >= 4  # the shell, and both ranks in theirs


@pytest.mark.parametrize(
    ("leave", "code", "told"),
    [
        ('raise ValueError("boom")', 1, "ValueError: boom"),
        ("sys.exit(7)", 7, ""),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT, ""),
    ],
)
def test_a_rank_whose_groups_do_not_end_ends_without_them(
    start: Start, leave: str, code: int, told: str
) -> None:
    run = start(hanging(ALONE.replace("LEAVE", leave), give_up=1.5), "hand")
    found, errors = end_of_rank_1(run)
    assert (found, told in errors) == (code, True), errors


def test_a_clean_end_that_takes_too_long_keeps_its_exit_code(start: Start) -> None:
    body = "with shoal.init() as world:\n    world.barrier()"
    ended = start(hanging(body, give_up=0.5), "hand").end()
    assert (ended.out.count("ended with 0"), ended.err.count("\n")) == (2, 1), ended.err
    assert ended.err.startswith("shoal: world size 2 on 1 node")


@pytest.mark.parametrize("end", ['raise ValueError("boom")', ""])
def test_a_world_that_python_closes_at_its_exit_ends_too(start: Start, end: str) -> None:
    run = start(hanging(f"world = shoal.init()\nworld.barrier()\n{end}", give_up=0.5), "hand")
    code, errors = end_of_rank_1(run)
    assert code == 1
    assert "leave_groups" in errors  # the stack of the main thread
    assert ("ValueError: boom" in errors) == bool(end)


def test_groups_are_aborted_after_a_failure_only(start: Start) -> None:
    notes = """
called = []
dist.destroy_process_group = lambda: called.append("destroy")
distributed_c10d._abort_process_group = lambda: called.append("abort")
for error in (None, SystemExit(), SystemExit(0), SystemExit(1), ValueError(), KeyboardInterrupt()):
    for exiting in (False, True):
        teardown.leave_groups(error, exiting=exiting)
assert called == ["destroy"] * 6 + ["abort"] * 6, called
"""
    ended = start(BEGIN + notes, "alone").end()
    assert ended.code == 0, ended.err
