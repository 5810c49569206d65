"""`shoal bench comm` on real ranks: started here and by mpirun, to the end and interrupted."""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import mpirun
from helpers.commands import Command, wait_for
from shoal.tools.bench.collectives import machine_file
from shoal.tools.bench.collectives.measure import OPERATIONS

pytestmark = [pytest.mark.processes, pytest.mark.full]

Start = Callable[..., Command]


@pytest.fixture
def start(start_command: Start) -> Start:
    return lambda *words: start_command([sys.executable, "-m", "shoal", "bench", "comm", *words])


def test_all_operations_over_gloo(start: Start, tmp_path: Path) -> None:
    asked = (
        "-n 2 --sizes 1KiB,16KiB,256KiB --repeats 3 --seconds 600 --pairs -o m.json --csv m.csv --json"
    )
    ended = start(*asked.split()).end()
    assert ended.code == 0, ended.err
    found = machine_file.read_machine_file(tmp_path / "m.json")
    assert [(each.backend, each.operation, each.ranks) for each in found.series] == [
        ("gloo", operation, 2) for operation in OPERATIONS
    ]
    for series in found.series[:-1]:
        assert [point.bytes for point in series.points] == [1 << 10, 16 << 10, 256 << 10]
        assert {point.samples for point in series.points} == {3}
        assert series.fit is not None
    assert found.complete
    assert found.links is not None
    assert found.links.bandwidth[0][0] is None
    assert found.links.bandwidth[0][1] is not None
    lines = ended.out.splitlines()
    assert lines[0].startswith("2 ranks on 1 machine: gloo moves ")
    assert max(map(len, lines[:-1])) <= 80
    assert json.loads(lines[-1]) == json.loads((tmp_path / "m.json").read_text())
    with (tmp_path / "m.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * (len(OPERATIONS) - 1) + 1
    assert "points, 3 samples of each: about" in ended.err


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured(start: Start, tmp_path: Path) -> None:
    endless = "-n 2 --sizes 1KiB,4KiB --repeats 1000000 --seconds 3600 -o m.json"
    running = start(*endless.split())
    assert running.process.stderr is not None
    assert any("Ctrl-C ends it" in line for line in running.process.stderr)
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    found = machine_file.read_machine_file(tmp_path / "m.json")
    assert not found.complete
    assert found.series
    assert "The measurement was ended early" in ended.out
    wait_for(lambda: not running.members())


@pytest.mark.system
@pytest.mark.parametrize(
    "program",
    [mpirun.PROGRAMS[0], *(pytest.param(p, marks=pytest.mark.long) for p in mpirun.PROGRAMS[1:])],
)
def test_mpi_beside_gloo(program: str, start_command: Start, tmp_path: Path) -> None:
    sizes = "1KiB,16KiB,256KiB"
    asked = f"--backend gloo,mpi --sizes {sizes} --repeats 3 --seconds 600 -o m.json".split()
    arguments = ["bench", "comm", *asked]
    script = f"import sys; sys.argv[1:] = {arguments}\nfrom shoal.cli.main import main; main()"
    ended = start_command([*mpirun.command(program, 2, tmp_path), "-c", script]).end()
    assert ended.code == 0, ended.err
    found = machine_file.read_machine_file(tmp_path / "m.json")
    assert [(each.backend, each.operation) for each in found.series] == [
        (backend, operation) for backend in ("mpi", "gloo") for operation in OPERATIONS
    ]
    assert "gloo takes " in ended.out
    assert "as long as mpi at 1 KiB" in " ".join(ended.out.split())
