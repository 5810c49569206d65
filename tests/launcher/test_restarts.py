"""Restarts of `shoal run` with real processes: failures that repeat, and faults that may pass."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from helpers.commands import Command

pytestmark = pytest.mark.processes

Start = Callable[..., Command]


REPEATS = """
import sys
import torch
import shoal

def loss(output, batch):
    step = run.step
    if world.rank == 1 and step == 3 + int(sys.argv[1]) * world.placement.attempt:
        raise ValueError("a bad sample")
    return output.square().sum(), len(output)

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(4, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch))
    loader = shoal.Loader(torch.ones(80, 4), world, batch_size=8)
    with shoal.Run("run", step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(1):
            step(batch)
            run.tick(every=2)
"""


@pytest.mark.full
@pytest.mark.parametrize("moves", [pytest.param(0, marks=pytest.mark.long), 1])
def test_restarts_end_where_the_failure_repeats(start_run: Start, moves: int) -> None:
    """At the same rank, line and step."""
    run = start_run(REPEATS, "-n", "2", "--restarts", "2", "script.py", str(moves))
    ended = run.end()
    assert ended.code == 1
    assert ended.err.count("ValueError: a bad sample") == (3 if moves else 2)
    if not moves:
        place = f"{run.folder}/script.py:9, after step 3"
        end = f"no restart: the same failure twice in a row: rank 1, {place}\n"
        assert ended.err.endswith(end)
        assert f"{place} (the other was stopped)\nrestart 1 of 2\n" in ended.err


STORM = """
import errno, os, signal, sys, urllib.error
import torch
import shoal

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        faults = [*sys.argv[2:], "-1:"]
        place, fault = faults[min(world.placement.attempt, len(faults) - 1)].split(":")
        if index == int(place) and fault == "503":
            raise urllib.error.HTTPError("http://data", 503, "", None, None)
        if index == int(place) and fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == int(place):
            raise OSError(getattr(errno, fault), "away", "/data/shard")  # raises
        return torch.ones(4)

def loss(output, batch):
    return output.square().sum(), len(output)

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(4, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch))
    loader = shoal.Loader(Samples(), world, batch_size=8, shuffle=False, num_workers=int(sys.argv[1]))
    with shoal.Run("run", step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(1):
            step(batch)
            run.tick(every=2)
"""


def waiting(number: int, seconds: int, cause: str, total: int) -> str:
    limit = f"waits: {total} s of at most 300 s"
    return f"restart {number} of 30 in {seconds} s: {cause} may pass ({limit})"


PASSES = (
    ["20:EIO", "20:ESTALE", "20:ENOENT", "44:503", "60:ECONNRESET"],
    [
        waiting(1, 1, "EIO", 1),
        waiting(2, 2, "ESTALE", 3),
        "restart 3 of 30",
        waiting(4, 1, "HTTP 503", 1),
        waiting(5, 1, "ECONNRESET", 1),
    ],
)
LASTS = (
    ["20:ETIMEDOUT", "20:SIGKILL", "20:EACCES", "20:EACCES"],
    [
        waiting(1, 1, "ETIMEDOUT", 1),
        "restart 2 of 30",
        "restart 3 of 30",
        "no restart: the same failure twice in a row: rank 1, PLACE, after step 2",
    ],
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "workers", "faults", "lines"),
    [
        (2, 1, *PASSES),
        pytest.param(1, 0, *PASSES, marks=pytest.mark.long),
        pytest.param(3, 0, *PASSES, marks=pytest.mark.long),
        pytest.param(2, 0, *LASTS, marks=pytest.mark.long),
    ],
)
def test_a_storm_of_faults_that_pass_and_that_last(
    start_run: Start, size: int, workers: int, faults: list[str], lines: list[str]
) -> None:
    """Waits double until the run makes progress; what lasts ends as without them."""
    run = start_run(STORM, "-n", f"{size}", "--restarts", "30", "script.py", f"{workers}", *faults)
    ended = run.end()
    assert ended.code == ("no restart" in lines[-1])
    said = [line for line in ended.err.splitlines() if re.match(r"(no )?restart\b", line)]
    (number,) = (n for n, line in enumerate(STORM.splitlines(), 1) if line.endswith("# raises"))
    assert said == [line.replace("PLACE", f"{run.folder}/script.py:{number}") for line in lines]


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "opened", "code"),
    [
        (signal.SIGUSR1, True, 75),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                (signal.SIGUSR2, True, 75),
                (signal.SIGTERM, True, 75),
                (signal.SIGHUP, True, 75),
                (signal.SIGINT, True, 130),
                (signal.SIGUSR1, False, 128 + signal.SIGUSR1),
            )
        ),
    ],
)
def test_a_signal_in_a_wait_means_the_same_as_while_ranks_run(
    start_run: Start, signum: signal.Signals, opened: bool, code: int
) -> None:
    """With an open Run, they would save; the last checkpoint is all there is to save."""
    script = STORM if opened else "raise OSError(5, 'away')"
    run = start_run(script, "-n", "1", "--restarts", "1", "script.py", "0", "20:EIO")
    assert run.process.stderr is not None
    assert any("EIO may pass (" in line for line in run.process.stderr)
    run.process.send_signal(signum)
    ended = run.end()
    assert (ended.code, ended.err) == (code, "")


@pytest.mark.full
@pytest.mark.parametrize(("outputs", "told"), [(os.pipe, "BrokenPipeError"), (os.openpty, "[Errno 5]")])
def test_an_output_that_nobody_reads_does_not_pass(
    start_run: Start, outputs: Callable[[], tuple[int, int]], told: str
) -> None:
    """As with `shoal run … | head -1`, and a terminal that is closed."""
    read, write = outputs()
    run = start_run("while True: print('a')", "-n", "1", "--restarts", "2", "script.py", stdout=write)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    ended = run.end()
    assert ended.code == 1
    assert told in ended.err
    assert re.findall("restart .*", ended.err) == ["restart 1 of 2", "restart 2 of 2"]
