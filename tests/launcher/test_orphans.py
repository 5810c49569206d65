"""What ranks leave running in sessions of their own: it may finish, and does not outlive the run."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.commands import Command, wait_for

pytestmark = pytest.mark.processes

LEAVES = """
import os, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
if os.environ["RANK"] == "1":
    child = subprocess.Popen([sys.executable, "child.py"], start_new_session=True)
    (here / "child.part").write_text(str(child.pid))
    (here / "child.part").rename(here / "child")
"""

ENDLESS = "import time\nwhile True:\n    time.sleep(1)\n"

UPLOADER = """
import os, time
from pathlib import Path

while os.getppid() == int(Path("rank1").read_text()):  # until the rank has ended
    time.sleep(0.01)
Path("uploaded").touch()
"""


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, start_command: Callable[..., Command]) -> Start:
    """Starts `shoal run` of a script, whose child is another script."""

    def begin(script: str, child: str, *options: str) -> Command:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        (tmp_path / "child.py").write_text(child)
        return start_command([sys.executable, "-m", "shoal", "run", *options, "script.py"])

    return begin


def child(run: Command) -> int:
    return int((run.folder / "child").read_text())


@pytest.mark.full
def test_a_child_in_a_session_of_its_own_is_ended_and_named(start: Start) -> None:
    run = start(LEAVES, ENDLESS, "-n", "2", "--grace", "0.5")
    ended = run.end()
    assert ended.code == 0, ended.err
    command = f"{sys.executable} child.py"[:80]
    said = (
        f"shoal run: process {child(run)} ({command}) of rank 1 was still running after 0.5 s and was"
    )
    assert said in ended.err
    assert not psutil.pid_exists(child(run))
    assert not run.members()


@pytest.mark.full
def test_a_child_in_a_session_of_its_own_may_finish(start: Start) -> None:
    write_pid = '(here / ("rank" + os.environ["RANK"])).write_text(str(os.getpid()))\n'
    run = start(
        LEAVES.replace('if os.environ["RANK"]', write_pid + 'if os.environ["RANK"]'),
        UPLOADER,
        "-n",
        "2",
    )
    ended = run.end()
    assert ended.code == 0, ended.err
    assert (run.folder / "uploaded").exists()
    assert "was killed" not in ended.err


@pytest.mark.full
def test_a_child_does_not_outlive_a_failure(start: Start) -> None:
    """Nor does it live on into the next attempt."""
    script = LEAVES + 'time.sleep(0.01)\nif os.environ["RANK"] == "0":\n'
    script += "    while not (here / 'child').exists():\n        time.sleep(0.01)\n    sys.exit(3)\n"
    run = start(script, ENDLESS, "-n", "2", "--grace", "0.5")
    ended = run.end()
    assert ended.code == 3
    assert f"process {child(run)} " in ended.err
    assert ended.err.splitlines()[-1].startswith("where: rank 0 of 2 on ")
    assert not run.members()


@pytest.mark.full
def test_children_that_end_while_the_run_goes_on_are_reaped(start: Start) -> None:
    script = """
    import os, subprocess, time
    from pathlib import Path

    here = Path(__file__).parent
    subprocess.run(["sh", "-c", "true & true & true &"])
    (here / f"ready{os.environ['RANK']}").touch()
    while not (here / "over").exists():
        time.sleep(0.01)
    """
    run = start(script, "", "-n", "1")
    run.wait_ready(1)
    launcher = psutil.Process(run.process.pid)

    def no_zombies() -> bool:
        states = [process.status() for process in launcher.children()]
        return psutil.STATUS_ZOMBIE not in states

    wait_for(no_zombies)
    (run.folder / "over").touch()
    assert run.end().code == 0


LATE = """
import os, signal, time
from pathlib import Path
import torch, shoal

here = Path(__file__).parent

def loss(output, batch):
    return output.sum(), len(output)

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(2, 2), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    data = shoal.Loader((torch.ones(9, 2),), world, batch_size=9)
    with shoal.Run(here / "run", step, data) as run:
        for batch in data.epochs(2):
            step(batch)
            run.tick()
        run.save()
        (here / f"ready{world.rank}").touch()
        while not run._stopping._asked:  # a signal comes after the last tick
            time.sleep(0.01)
"""


@pytest.mark.long
def test_a_signal_after_the_last_tick_changes_nothing(start: Start) -> None:
    """All is saved, and all ranks end well."""
    run = start(LATE, "", "-n", "2")
    run.wait_ready(2)
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 0, ended.err
