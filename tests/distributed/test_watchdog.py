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

import psutil
import pytest

from helpers.commands import GONE_WITHIN, Command, Ended, wait_for
from helpers.ranks import free_port

pytestmark = pytest.mark.processes

STEP_SECONDS = 6.0
"""No rank that a busy machine does not let run for some seconds shall be taken for one that hangs."""
PREPARE_SECONDS = 400.0
HOST = socket.gethostname()

SCRIPT = """
import os, sys, threading, time
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

def steps(count):
    for _ in range(count):
        world.watchdog.begin_step()
        world.barrier()

def ready():
    (here / f"ready{world.rank}.part").write_text(str(os.getpid()))
    (here / f"ready{world.rank}.part").rename(here / f"ready{world.rank}")

with shoal.init(timeout=TIMEOUT, prepare_timeout=PREPARE) as world:
    rank = world.rank
    steps(STEPS)
    ready()
BODY
"""


def indented(body: str) -> str:
    return textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")


class Hanging(Command):
    """Three ranks of the script with a body of its own, under some launcher."""

    def __init__(
        self, folder: Path, body: str, launcher: str, *, steps: int, prepare: float = PREPARE_SECONDS
    ) -> None:
        text = SCRIPT.replace("TIMEOUT", str(STEP_SECONDS)).replace("PREPARE", str(prepare))
        self.script = folder / "script.py"
        self.script.write_text(text.replace("STEPS", str(steps)).replace("BODY", indented(body)))
        by_hand = (
            f"export WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}\n"
            f"for rank in 0 1 2; do RANK=$rank LOCAL_RANK=$rank {sys.executable} script.py & done\nwait"
        )
        command = [sys.executable, "-m"]
        commands = {
            "shoal run": [*command, "shoal", "run", "-n", "3", "script.py"],
            "torchrun": [*command, "torch.distributed.run", "--nproc-per-node=3", "script.py"],
            "hand": ["sh", "-c", by_hand],
        }
        super().__init__(commands[launcher], folder)

    def at(self, marked: str) -> str:
        """The line of the script that holds a text, as reports name it."""
        lines = self.script.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, start=1) if marked in line)
        return f"{self.script}:{number}"

    def since_ready(self) -> float:
        """Seconds since the first rank was ready: none can have waited for longer."""
        return time.time() - min((self.folder / f"ready{rank}").stat().st_mtime for rank in range(3))

    def end_hung(self) -> tuple[float, Ended]:
        """Seconds from the moment in which the first was ready to the end, and what is left."""
        self.wait_ready(3)
        ended = self.end()
        return self.since_ready(), ended


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


def check_time(seconds: float, text: str) -> None:
    """Not before the time limit of a step, and not by that of preparation."""
    assert STEP_SECONDS * 0.9 < seconds < PREPARE_SECONDS, text


def check_end(run: Hanging, seconds: float, ended: Ended) -> None:
    """In time, with the code of a hang, and nothing left."""
    check_time(seconds, ended.err)
    assert ended.code == 124, ended.err
    wait_for(lambda: not run.members(), GONE_WITHIN)


ASLEEP = """
    if rank == 1:
        event.wait()  # asleep
    world.barrier()  # awake
"""


@pytest.mark.full
def test_a_rank_that_does_not_arrive_is_named_with_its_line(start: Start) -> None:
    """FAILURES 18: rank 1 sleeps before a collective."""
    run = start(ASLEEP)
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    before, waited, after = re.split(r" waited (\d+) s ", the_line(ended.err))
    place = f"{run.at('# asleep')} in <module>"
    assert before == f"rank 1 of 3 on {HOST} did not arrive: it is at {place}; ranks 0 and 2 have"
    assert int(waited) >= STEP_SECONDS
    assert after == f"in all_reduce of float32[] at {run.at('# awake')}"
    *_, last = ended.err.splitlines()
    assert last == f"where: rank 1 of 3 on {HOST}, {run.at('# asleep')} (the other 2 were stopped)"
    (kept,) = re.findall(r"see (\S+),", ended.err)
    details = Path(kept).read_text()
    assert details.count("thread MainThread") == 3
    assert "all_reduce of float32[], not done" in details


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("torchrun", marks=pytest.mark.long), pytest.param("hand", marks=pytest.mark.full)],
)
def test_ranks_that_others_started_report_too(start: Start, launcher: str) -> None:
    run = start(ASLEEP, launcher)
    run.wait_ready(3)
    ranks = [int((run.folder / f"ready{rank}").read_text()) for rank in range(3)]
    wait_for(lambda: not [pid for pid in ranks if psutil.pid_exists(pid)])
    seconds = run.since_ready()
    ended = run.end()
    check_time(seconds, ended.err)
    assert the_line(ended.err).startswith(f"rank 1 of 3 on {HOST} did not arrive: it is at ")
    assert f"where: rank 1 of 3 on {HOST}, {run.at('# asleep')}\n" in ended.err
    wait_for(lambda: not run.members(), GONE_WITHIN)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("shoal run", marks=pytest.mark.full), pytest.param("hand", marks=pytest.mark.long)],
)
def test_a_stopped_rank_is_named_by_its_silence_and_killed(start: Start, launcher: str) -> None:
    """By hand, rank 0 has the store: the side channel must not go through it."""
    run = start("while True:\n    world.barrier()  # alive", launcher)
    run.wait_ready(3)
    stopped = int((run.folder / "ready0").read_text())
    begun = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: not run.members())
    seconds, ended = time.monotonic() - begun, run.end()
    check_time(seconds, ended.err)
    said = the_line(ended.err)
    assert said.startswith(f"rank 0 of 3 on {HOST} does not answer: process {stopped} is stopped")
    assert said.endswith(f"in all_reduce of float32[] at {run.at('# alive')}")


@pytest.mark.full
def test_a_rank_that_keeps_pythons_lock_is_named_before_it_is_killed(start: Start) -> None:
    run = start(
        """
        import ctypes, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            ctypes.PyDLL(None).sleep(100000)  # in C, with the lock
        world.barrier()
        """
    )
    run.wait_ready(3)
    stuck = int((run.folder / "ready1").read_text())
    assert run.process.stderr is not None
    said = next(line for line in run.process.stderr if line.startswith("found: "))
    assert psutil.pid_exists(stuck), "the report must not wait for the end of the rank"
    assert f"rank 1 of 3 on {HOST} does not answer: process {stuck} is stopped, out of " in said
    assert run.end().code == 124
    wait_for(lambda: not run.members(), GONE_WITHIN)


@pytest.mark.long
def test_a_loader_that_blocks_is_named(start: Start) -> None:
    """Its worker, a process of its own, is ended too."""
    run = start(
        """
        blocked = shoal.Loader(Blocked(rank), world, batch_size=9, num_workers=1)
        for batch in blocked.epochs(1):  # the loop
            world.barrier()
        """,
        "hand",
    )
    run.wait_ready(3)
    wait_for(lambda: not run.members())
    check_time(run.since_ready(), "")
    said = the_line(run.end().err)
    place = f"{run.at('# the loop')} in <module>"
    assert said.startswith(f"rank 1 of 3 on {HOST} did not arrive: it is at {place}; ")


@pytest.mark.long
def test_another_operation_is_named_after_the_first_steps(start: Start) -> None:
    run = start(
        """
        if rank == 2:
            dist.broadcast(torch.ones(3), 0)  # other
        else:
            dist.all_reduce(torch.ones(3))  # usual
        """
    )
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    assert the_line(ended.err) == (
        f"rank 2 of 3 on {HOST} called broadcast of float32[3] at {run.at('# other')}, where rank 0 "
        f"called all_reduce of float32[3] at {run.at('# usual')}: all ranks must call the same"
    )


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
    start: Start, call: str, did: str
) -> None:
    """On Gloo another size would abort the process, and another dtype go unnoticed."""
    body = f"if rank == 2:\n    {call}  # other\nelse:\n    dist.all_reduce(torch.ones(3))  # usual"
    run = start(body, steps=1)
    ended = run.end()
    assert ended.code == 1
    assert f"found: rank 2 on {HOST} calls {did} at {run.at('# other')}\n" in ended.err
    usual = f"all_reduce of float32[3] at {run.at('# usual')} (rank 0 on {HOST})"
    assert f"given: {usual}, on 2 of 3 ranks\n" in ended.err


@pytest.mark.full
def test_a_pipeline_that_waits_for_a_message_is_seen(start: Start) -> None:
    run = start(
        """
        if rank == 1:
            event.wait()  # asleep
        if rank == 2:
            dist.recv(torch.ones(3), 1)  # receives
        event.wait()
        """
    )
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    assert ended.err.count(f"{run.at('# receives')} in <module>  waits in recv\n") == 1
    assert "rank 0 of 3" in the_line(ended.err)  # it sleeps too, and nobody knows who is to send


@pytest.mark.long
def test_a_collective_of_a_thread_that_python_did_not_start_is_seen(start: Start) -> None:
    """As those of a backward on a GPU, which a thread of autograd begins."""
    run = start(
        """
        import _thread

        def backward():
            threading.current_thread()  # as logging does: Python now knows the thread
            dist.all_reduce(torch.ones(3))

        if rank == 1:
            event.wait()  # asleep
        _thread.start_new_thread(backward, ())
        event.wait()
        """
    )
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    assert f"rank 1 of 3 on {HOST} did not arrive" in the_line(ended.err)


@pytest.mark.full
def test_an_exception_is_reported_and_not_the_wait_for_its_rank(start: Start) -> None:
    run = start(
        """
        if rank == 1:
            raise ValueError("the cause")
        world.barrier()
        """
    )
    ended = run.end()
    assert ended.code == 1
    assert "ValueError: the cause" in ended.err
    assert "did not arrive" not in ended.err


@pytest.mark.full
def test_a_rank_that_has_left_is_named(start: Start) -> None:
    run = start(
        """
        if rank == 1:
            world.watchdog._watch.stop()  # as at its end, but with connections that last
            event.wait()
        world.barrier()
        """
    )
    seconds, ended = run.end_hung()
    check_end(run, seconds, ended)
    assert the_line(ended.err).startswith(f"rank 1 of 3 on {HOST} has ended or left its world (its ")


@pytest.mark.long
def test_what_takes_long_and_makes_nobody_wait_in_vain_is_no_hang(start: Start) -> None:
    """FAILURES 20: before the first step, in sections for it, and on all ranks alike."""
    run = start(
        f"""
        long = {STEP_SECONDS + 1}
        with world.rank_zero_first() as first:
            event.wait(long if first else 0)
        with world.preparing():
            event.wait(long if world.is_rank_zero else 0)
            world.barrier()
        event.wait(long)  # a slow step, evaluation or save, on all ranks
        steps(2)
        (here / f"done{{rank}}").touch()
        while not world.broadcast((here / "over").exists()):
            time.sleep(0.01)
        """
    )
    wait_for(lambda: all((run.folder / f"done{rank}").exists() for rank in range(3)))
    pid = int((run.folder / "ready1").read_text())
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: time.monotonic() > stopped + STEP_SECONDS / 4)
    os.kill(pid, signal.SIGCONT)
    (run.folder / "over").touch()
    ended = run.end()
    assert (ended.code, "found:" in ended.err) == (0, False), ended.err


@pytest.mark.long
def test_all_stopped_at_once_is_no_hang(start: Start) -> None:
    """As a scheduler suspends a job: time in which nobody ran is nobody's fault."""
    run = start(
        """
        while not world.broadcast((here / "over").exists()):
            event.wait(0.05)
        """
    )
    run.wait_ready(3)
    pids = [int((run.folder / f"ready{rank}").read_text()) for rank in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: time.monotonic() > stopped + STEP_SECONDS + 1)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    (run.folder / "over").touch()
    ended = run.end()
    assert (ended.code, "found:" in ended.err) == (0, False), ended.err


@pytest.mark.long
def test_rank_0_may_prepare_before_the_first_step_in_a_collective(start: Start) -> None:
    run = start(
        f"""
        event.wait({STEP_SECONDS + 1} if world.is_rank_zero else 0)
        world.barrier()
        """,
        steps=0,
    )
    ended = run.end()
    assert (ended.code, "found:" in ended.err) == (0, False), ended.err


@pytest.mark.long
def test_a_save_that_takes_one_rank_long_is_no_hang(start: Start) -> None:
    run = start(
        f"""
        class Slow:
            def state_dict(self):
                event.wait({STEP_SECONDS + 1} if world.is_rank_zero else 0)
                return {{}}
            def load_state_dict(self, state):
                pass

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
    ended = run.end()
    assert (ended.code, "found:" in ended.err) == (0, False), ended.err
