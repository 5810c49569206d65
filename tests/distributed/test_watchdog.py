"""Ranks that wait for one that never comes: who is named, where, how soon, and what is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.commands import GONE_WITHIN, wait_for
from helpers.scripts import Script

pytestmark = pytest.mark.processes

STEP_SECONDS = 6.0
"""No rank that a busy machine does not let run for some seconds shall be taken for one that hangs."""
PREPARE_SECONDS = 400.0
HOST = socket.gethostname()

SCRIPT = f"""
import os, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist, shoal

here = Path(__file__).parent
event = threading.Event()

def steps(count):
    for _ in range(count):
        world.watchdog.begin_step()
        world.barrier()

with shoal.init(timeout={STEP_SECONDS}, prepare_timeout={PREPARE_SECONDS}) as world:
    rank = world.rank
    steps(STEPS)
    (here / f"ready{{rank}}.part").write_text(str(os.getpid()))
    (here / f"ready{{rank}}.part").rename(here / f"ready{{rank}}")
BODY
"""


class Hanging:
    """Three ranks of the script with a body of its own."""

    def __init__(
        self, start: Callable[..., Script], body: str, launcher: str = "shoal run", *, steps: int = 4
    ) -> None:
        body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        text = SCRIPT.replace("STEPS", str(steps)).replace("BODY", body)
        self.run = start(text, launcher, size=3)
        self.at = self.run.at
        self.files = [self.run.folder / f"ready{rank}" for rank in range(3)]

    def ready(self) -> list[int]:
        """The process ids of the ranks, when they have come to the body."""
        self.run.wait_ready(3)
        return [int(file.read_text()) for file in self.files]

    def end(self) -> str:
        """What is said when the ranks have ended: by the time limit of a step, and all."""
        ranks = self.ready()
        begun = min(file.stat().st_mtime for file in self.files)  # none can have waited for longer
        wait_for(lambda: not any(map(psutil.pid_exists, ranks)))
        seconds = time.time() - begun
        ended = self.run.end()
        assert STEP_SECONDS * 0.9 < seconds < PREPARE_SECONDS, ended.err
        if "shoal" in self.run.process.args:  # type: ignore[operator]
            assert ended.code == 124, ended.err
        wait_for(lambda: not self.run.members(), GONE_WITHIN)
        return ended.err

    def end_well(self) -> None:
        ended = self.run.end()
        assert (ended.code, "found:" in ended.err) == (0, False), ended.err


@pytest.fixture
def hang(start: Callable[..., Script]) -> Callable[..., Hanging]:
    return lambda *given, **options: Hanging(start, *given, **options)


Start = Callable[..., Hanging]


def the_line(text: str) -> str:
    """The one line of a report that says it all."""
    (line,) = re.findall(r"^found: (.*)$", text, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("shoal run", marks=pytest.mark.full),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("torchrun", "hand")),
    ],
)
def test_a_rank_that_does_not_arrive_is_named_with_its_line(launcher: str, hang: Start) -> None:
    """FAILURES 18: rank 1 sleeps before a collective."""
    run = hang("if rank == 1:\n    event.wait()  # asleep\nworld.barrier()  # awake", launcher)
    said = run.end()
    before, waited, after = re.split(r" waited (\d+) s ", the_line(said))
    place = f"{run.at('# asleep')} in <module>"
    assert before == f"rank 1 of 3 on {HOST} did not arrive: it is at {place}; ranks 0 and 2 have"
    assert int(waited) >= STEP_SECONDS
    assert after == f"in all_reduce of float32[] at {run.at('# awake')}"
    where = f"where: rank 1 of 3 on {HOST}, {run.at('# asleep')}"
    if launcher != "shoal run":
        assert f"{where}\n" in said
        return
    assert said.splitlines()[-1] == f"{where} (the other 2 were stopped)"
    (kept,) = re.findall(r"see (\S+),", said)
    details = Path(kept).read_text()
    assert details.count("thread MainThread") == 3
    assert "all_reduce of float32[], not done" in details


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("shoal run", marks=pytest.mark.full), pytest.param("hand", marks=pytest.mark.long)],
)
def test_a_stopped_rank_is_named_by_its_silence_and_killed(launcher: str, hang: Start) -> None:
    """By hand, rank 0 has the store: the side channel must not go through it."""
    run = hang("while True:\n    world.barrier()  # alive", launcher)
    stopped = run.ready()[0]
    begun = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: not run.run.members())
    seconds, ended = time.monotonic() - begun, run.run.end()
    assert STEP_SECONDS * 0.9 < seconds < PREPARE_SECONDS, ended.err
    said = the_line(ended.err)
    assert said.startswith(f"rank 0 of 3 on {HOST} does not answer: process {stopped} is stopped")
    assert said.endswith(f"in all_reduce of float32[] at {run.at('# alive')}")


@pytest.mark.full
def test_a_rank_that_keeps_pythons_lock_is_named_before_it_is_killed(hang: Start) -> None:
    run = hang(
        """
        import ctypes, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            ctypes.PyDLL(None).sleep(100000)  # in C, with the lock
        world.barrier()
        """
    )
    stuck = run.ready()[1]
    errors = run.run.process.stderr
    assert errors is not None
    said = next(line for line in errors if line.startswith("found: "))
    assert psutil.pid_exists(stuck), "the report must not wait for the end of the rank"
    assert f"rank 1 of 3 on {HOST} does not answer: process {stuck} is stopped, out of " in said
    assert run.run.end().code == 124
    wait_for(lambda: not run.run.members(), GONE_WITHIN)


@pytest.mark.long
def test_a_loader_that_blocks_is_named(hang: Start) -> None:
    """Its worker, a process of its own, is ended too."""
    run = hang(
        """
        class Blocked(torch.utils.data.Dataset):
            def __len__(self):
                return 999
            def __getitem__(self, index):
                if rank == 1:
                    event.wait()
                return torch.ones(2)

        blocked = shoal.Loader(Blocked(), world, batch_size=9, num_workers=1)
        for batch in blocked.epochs(1):  # the loop
            world.barrier()
        """,
        "hand",
    )
    place = f"{run.at('# the loop')} in <module>"
    assert the_line(run.end()).startswith(f"rank 1 of 3 on {HOST} did not arrive: it is at {place}; ")


@pytest.mark.full
@pytest.mark.parametrize(
    ("call", "did"),
    [
        ("dist.broadcast(torch.ones(3), 0)", "broadcast of float32[3]"),
        ("dist.all_reduce(torch.ones(4))", "all_reduce of float32[4]"),
        ("dist.all_reduce(torch.ones(3).int())", "all_reduce of int32[3]"),
    ],
)
def test_what_does_not_match_is_named_at_once_in_the_first_steps(
    call: str, did: str, hang: Start
) -> None:
    """On Gloo another size would abort the process, and another dtype go unnoticed."""
    body = f"if rank == 2:\n    {call}  # other\nelse:\n    dist.all_reduce(torch.ones(3))  # usual"
    run = hang(body, steps=1)
    ended = run.run.end()
    assert ended.code == 1
    assert f"found: rank 2 on {HOST} calls {did} at {run.at('# other')}\n" in ended.err
    usual = f"all_reduce of float32[3] at {run.at('# usual')} (rank 0 on {HOST})"
    assert f"given: {usual}, on 2 of 3 ranks\n" in ended.err


@pytest.mark.full
def test_a_pipeline_that_waits_for_a_message_is_seen(hang: Start) -> None:
    run = hang("if rank == 2:\n    dist.recv(torch.ones(3), 1)  # receives\nevent.wait()")
    said = run.end()
    assert said.count(f"{run.at('# receives')} in <module>  waits in recv\n") == 1
    assert "rank 0 of 3" in the_line(said)  # it sleeps too, and nobody knows who is to send


@pytest.mark.long
def test_a_collective_of_a_thread_that_python_did_not_start_is_seen(hang: Start) -> None:
    """As those of a backward on a GPU, which a thread of autograd begins."""
    run = hang(
        """
        import _thread

        def backward():
            threading.current_thread()  # as logging does: Python now knows the thread
            dist.all_reduce(torch.ones(3))

        if rank != 1:
            _thread.start_new_thread(backward, ())
        event.wait()
        """
    )
    assert f"rank 1 of 3 on {HOST} did not arrive" in the_line(run.end())


@pytest.mark.long
def test_what_takes_long_and_makes_nobody_wait_in_vain_is_no_hang(hang: Start) -> None:
    """FAILURES 20: before the first step, in sections for it, in saves, and on all ranks alike."""
    run = hang(
        f"""
        class Slow:
            def state_dict(self):
                event.wait(long)
                return {{}}
            def load_state_dict(self, state):
                pass

        long = {STEP_SECONDS + 1} if world.is_rank_zero else 0
        event.wait(long)
        world.barrier()
        steps(4)
        with world.rank_zero_first():
            event.wait(long)
        with world.preparing():
            event.wait(long)
            world.barrier()
        event.wait({STEP_SECONDS + 1})  # a slow step, evaluation or save, on all ranks
        steps(2)
        (here / f"done{{rank}}").touch()
        while not world.broadcast((here / "over").exists()):
            time.sleep(0.01)
        model = shoal.parallelize(torch.nn.Linear(2, 2), world)
        task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
        data = shoal.Loader((torch.ones(9, 2),), world, batch_size=9)
        with shoal.Run(here / "run", step, data, state={{"slow": Slow()}}) as run:
            for batch in data.epochs(1):
                step(batch)
                run.tick()
            run.save()
        """,
        steps=0,
    )
    pid = run.ready()[1]
    wait_for(lambda: all((run.run.folder / f"done{rank}").exists() for rank in range(3)))
    pause([pid], STEP_SECONDS / 4)
    (run.run.folder / "over").touch()
    run.end_well()


def pause(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: time.monotonic() > stopped + seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_all_stopped_at_once_is_no_hang(hang: Start) -> None:
    """As a scheduler suspends a job: time in which nobody ran is nobody's fault."""
    run = hang("while not world.broadcast((here / 'over').exists()):\n    event.wait(0.05)")
    pause(run.ready(), STEP_SECONDS + 1)
    (run.run.folder / "over").touch()
    run.end_well()
