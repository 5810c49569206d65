"""Commands whose ranks are told to stop: what they save, the exit codes, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.commands import GONE_WITHIN, Command, Ended, wait_for
from helpers.ranks import free_port
from shoal.distributed.cluster_env import REQUEUE
from shoal.launcher.workers import GRACE
from shoal.telemetry import events

pytestmark = pytest.mark.processes

STEPS = 12
AT = 3

# At step AT each rank stays until somebody asks for the end; a save takes as long as `hold` is there.
TRAIN = """
import sys, time
from pathlib import Path
import torch, torch.nn.functional as F
import shoal

here = Path(__file__).parent

class Slow:
    def state_dict(self):
        while (here / "hold").exists():
            (here / f"saving{world.rank}").touch()
            time.sleep(0.01)
        return {}
    def load_state_dict(self, state):
        pass

def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

with shoal.init(seed=0) as world:
    samples = (torch.randn(24, 4).double(), torch.arange(24) % 3)
    model = shoal.parallelize(torch.nn.Linear(4, 3).double(), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(loss))
    data = shoal.Loader(samples, world, batch_size=6)
    try:
        with shoal.Run(here / "run", step, data, state={"slow": Slow()}) as run:
            run.restore()
            for batch in data.epochs(3):
                step(batch)
                if step.number == AT:
                    (here / f"ready{world.rank}").touch()
                    while not run._stopping._asked:
                        time.sleep(0.01)
                run.tick()
    except Exception:
        (here / "swallowed").touch()
        raise
    world.print(f"the end, step {step.number}")
""".replace("AT:", f"{AT}:")

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, start_command: Start) -> Start:
    (tmp_path / "train.py").write_text(TRAIN)
    return lambda *command: start_command([sys.executable, *command])


def shoal_run(*options: str) -> list[str]:
    return ["-m", "shoal", "run", "-n", "2", *options, "train.py"]


def rank_one(run: Command) -> int:
    """The process of rank 1."""
    found = []
    for pid in run.members():
        with suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).name() == "train.py 1" else []
    (pid,) = found
    return pid


def saved(folder: Path, kind: str = "preempted") -> int:
    """The step that all ranks stopped and saved in."""
    (checkpoint,) = (folder / "run/checkpoints").iterdir()
    written = [list(events.read_events(path)) for path in (folder / "run/events").iterdir()]
    steps = {event["step"] for each in written for event in each if event["event"] == kind}
    assert [f"step-{step}" for step in steps] == [checkpoint.name]
    assert not (folder / "swallowed").exists()
    return int(steps.pop())


def assert_goes_on(start: Start, *command: str) -> None:
    again = start(*command)
    ended = again.end()
    assert (ended.code, "resumed at sample" in ended.out) == (0, True), ended.err
    assert ended.out.endswith(f"the end, step {STEPS}\n")
    assert again.members() == []


def assert_said_once(ended: Ended, what: str, step: int) -> None:
    said = rf"^{what}: saved step {step} in .*; the same command resumes from there$"
    assert len(re.findall(said, ended.out, re.MULTILINE)) == 1


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2])
@pytest.mark.parametrize("told", ["launcher", "rank 1", "process alone"])
def test_the_launcher_is_told(told: str, signum: signal.Signals, start: Start) -> None:
    """FAILURES 10: or one rank alone, or a process without a launcher; the same command goes on."""
    command = ["train.py"] if told == "process alone" else shoal_run()
    budgets = ["--preemptions", "3", "--restarts", "3"] if told == "launcher" else []
    run = start(*command[:-1], *budgets, "train.py")
    run.wait_ready(1 if told == "process alone" else 2)
    for _ in range(2 if told == "process alone" else 1):
        os.kill(rank_one(run) if told == "rank 1" else run.process.pid, signum)
    ended = run.end()
    assert (ended.code, "Traceback" in ended.err, "where:" in ended.err) == (REQUEUE, False, False)
    step = saved(run.folder)
    assert step >= AT
    if told != "launcher":
        assert_said_once(ended, rf"{signum.name} on rank {int(told == 'rank 1')}", step)
    assert run.members() == []
    assert_goes_on(start, *command)


def tell_all(run: Command, signum: signal.Signals) -> None:
    """As a scheduler does: every process of the job."""
    for pid in run.members():
        os.kill(pid, signum)


def wait_for_saves(run: Command) -> None:
    wait_for(lambda: all((run.folder / f"saving{rank}").exists() for rank in range(2)))


@pytest.mark.long
def test_all_processes_are_told_twice_and_the_save_takes_long(start: Start) -> None:
    """FAILURES 7: longer than the ranks would have without a Run."""
    run = start(*shoal_run())
    run.wait_ready(2)
    hold = run.folder / "hold"
    hold.touch()
    told = time.monotonic()
    tell_all(run, signal.SIGTERM)
    wait_for_saves(run)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        tell_all(run, signum)
    wait_for(lambda: time.monotonic() > told + GRACE + 1)
    hold.unlink()
    ended = run.end()
    assert (ended.code, "Traceback" in ended.err) == (REQUEUE, False)
    assert saved(run.folder) >= AT
    assert run.members() == []
    assert_goes_on(start, *shoal_run())


@pytest.mark.full
def test_the_grace_that_was_asked_for_is_kept(start: Start) -> None:
    run = start(*shoal_run("--grace", "0.5"))
    run.wait_ready(2)
    (run.folder / "hold").touch()
    run.process.terminate()
    assert run.end(timeout=GONE_WITHIN).code == 128 + signal.SIGTERM
    assert run.members() == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(shoal_run(), marks=pytest.mark.full),
        pytest.param(["train.py"], marks=pytest.mark.long),
    ],
)
def test_ctrl_c_saves_and_a_second_one_ends_at_once(command: list[str], start: Start) -> None:
    ranks = 2 if "-n" in command else 1
    run = start(*command)
    run.wait_ready(ranks)
    # As a terminal does: to the group in its foreground.
    os.killpg(run.process.pid, signal.SIGINT)
    ended = run.end()
    assert (ended.code, "Traceback" in ended.err) == (128 + signal.SIGINT, False)
    assert ended.err.count("Ctrl-C again ends at once") == 1
    assert_said_once(ended, r"SIGINT on rank \d", saved(run.folder, "interrupted"))

    (run.folder / "run/checkpoints").rename(run.folder / "kept")
    for path in run.folder.glob("ready*"):
        path.unlink()
    twice = start(*command)
    twice.wait_ready(ranks)
    (run.folder / "hold").touch()
    os.killpg(twice.process.pid, signal.SIGINT)
    wait_for(lambda: all((run.folder / f"saving{rank}").exists() for rank in range(ranks)))
    os.killpg(twice.process.pid, signal.SIGINT)
    ended = twice.end(timeout=GONE_WITHIN)
    assert ended.code in (128 + signal.SIGINT, -signal.SIGINT)
    assert not list((run.folder / "run/checkpoints").glob("step-*/manifest.json"))
    assert twice.members() == []


@pytest.mark.long
@pytest.mark.parametrize("one", [True, False])
def test_under_torchrun(one: bool, start: Start) -> None:
    """torchrun passes SIGTERM on, has an exit code of its own, and kills after half a minute."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    command[4:4] = ["--master-port", str(free_port())]
    run = start(*command)
    run.wait_ready(2)
    ranks = [p for p in run.members() if p != run.process.pid and _is_rank(p)]
    assert len(ranks) == 2
    os.kill(ranks[0] if one else run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 1
    assert ("exitcode  : 75" in ended.err) == one
    assert saved(run.folder) >= AT
    assert_goes_on(start, *command)


def _is_rank(pid: int) -> bool:
    return psutil.Process(pid).cmdline()[-1] == "train.py"


@pytest.mark.full
def test_a_preemption_is_no_failure_and_has_a_budget_of_its_own(start: Start) -> None:
    run = start(*shoal_run("--preemptions", "1", "--logs", "logs"))
    run.wait_ready(2)
    os.kill(rank_one(run), signal.SIGUSR1)
    ended = run.end()
    assert (ended.code, ended.err) == (0, "preemption 1 of 1\n")
    assert_said_once(ended, "SIGUSR1 on rank 1", saved(run.folder))
    assert ended.out.endswith(f"the end, step {STEPS}\n")
    assert "attempt 2 of 2" in (run.folder / "logs/rank-0.log").read_text()


LATE = """
import atexit, os, signal
from shoal.cli.main import main

atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # when the ranks have long saved
main()
"""


@pytest.mark.full
def test_a_signal_as_the_launcher_ends_does_not_change_its_code(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"raise SystemExit({REQUEUE})")
    run = start("-c", LATE, "run", "-n", "1", "train.py")
    assert run.end().code == REQUEUE
