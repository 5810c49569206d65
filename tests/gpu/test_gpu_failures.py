"""Two ranks on devices of which one fails or hangs: it is reported, and all end in time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.accelerators import on_accelerator
from helpers.commands import GONE_WITHIN, Command, wait_for
from shoal.distributed.cpu_affinity import near
from shoal.distributed.device import RankDevice
from shoal.util import accelerator

pytestmark = pytest.mark.processes

HOST = socket.gethostname()
STEP_SECONDS = 6.0
ENDS_WITHIN = 120.0
"""Process groups get ten seconds, and then processes end; torch alone would wait for an hour."""

SCRIPT = """
import json, os, sys, threading
from pathlib import Path
import torch, shoal

event = threading.Event()

class Model(torch.nn.Linear):
    def forward(self, given):
        LATE_IN_FORWARD
        return super().forward(given)

def loss(output, batch):
    return output.square().sum(), len(output)

with shoal.init(device=DEVICE, timeout=TIMEOUT, prepare_timeout=100) as world:
    model = shoal.parallelize(Model(64, 64), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True), shoal.Task(loss))
    for batch in shoal.Loader((torch.ones(800, 64),), world, batch_size=8).epochs(1):
        if world.rank == 1 and step.number == 6:
            BEFORE_STEP
        step(batch)
"""

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, device: str, start_command: Start) -> Start:
    """A function that starts the script on two ranks, with code for rank 1 in its seventh step."""

    def begin(*, forward: str = "pass", before: str = "pass") -> Command:
        text = SCRIPT.replace("DEVICE", repr(device)).replace("TIMEOUT", str(STEP_SECONDS))
        text = text.replace("LATE_IN_FORWARD", textwrap.indent(forward, 8 * " ").strip())
        (tmp_path / "script.py").write_text(text.replace("BEFORE_STEP", before))
        return start_command([sys.executable, "-m", "shoal", "run", "-n", "2", "script.py"])

    return begin


FAILS = """
if self.training and world.rank == 1 and step.number == 6:
    Path("failing").touch()
    raise ValueError("a bad sample")
"""


def test_a_rank_that_fails_reports_first_and_all_end(start: Start, tmp_path: Path) -> None:
    """The other rank is in the collectives of backward, which nobody joins any more."""
    run = start(forward=FAILS)
    ended = run.end()
    took = time.time() - (tmp_path / "failing").stat().st_mtime
    assert ended.code == 1
    assert "ValueError: a bad sample" in ended.err
    assert ended.err.splitlines()[-1].startswith("where: rank 1 of 2 on ")
    assert took < ENDS_WITHIN
    wait_for(lambda: not run.members(), GONE_WITHIN)


def test_a_rank_that_hangs_is_reported_with_its_line(start: Start, tmp_path: Path) -> None:
    """The other waits for sums that backward's own thread has asked for."""
    run = start(before="event.wait()  # asleep")
    ended = run.end()
    assert ended.code == 124, ended.err
    lines = (tmp_path / "script.py").read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, start=1) if "# asleep" in line)
    assert f"rank 1 of 2 on {HOST} did not arrive: it is at" in ended.err
    assert f"script.py:{number} in <module>" in ended.err
    wait_for(lambda: not run.members(), GONE_WITHIN)


PLACES = """
import json, os, shoal
from shoal.distributed.device import RankDevice
with shoal.init() as world:
    found = world.gather((RankDevice.of(world.device).pci, sorted(os.sched_getaffinity(0))))
    world.print("places: " + json.dumps(found))
"""


def outcome(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *command],
        cwd=folder, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout


@on_accelerator("cuda", 2)
def test_ranks_have_the_cores_near_their_gpu(tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(PLACES)
    text = outcome("run", "-n", "2", "places.py", folder=tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("places: "))
    for pci, cores in json.loads(line.removeprefix("places: ")):
        assert set(cores) <= near(pci)


@on_accelerator("cuda")
def test_info_and_doctor_know_the_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    assert near(RankDevice.of(device).pci), "the kernel lists the GPU at its PCI address"
    assert accelerator.name(device) in outcome("info", folder=tmp_path)
    assert "FAILURE" not in outcome("doctor", "-n", "1", folder=tmp_path)
