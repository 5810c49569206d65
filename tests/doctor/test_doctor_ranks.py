"""`shoal doctor` over ranks: each planted fault is named with its rank and host, and nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import shoal
from helpers.commands import Command
from helpers.rank_facts import SHOAL, call, environment
from helpers.ranks import Ranks, free_port
from shoal.tools.doctor.checks import compute, filesystem, software
from shoal.tools.doctor.findings import Examination, Severity
from shoal.tools.doctor.runner import DoctorRequest, examine_together
from shoal.util.packages import packages

pytestmark = [pytest.mark.processes, pytest.mark.full]

RANKS = 3
ODD = 2
"""The rank in which faults are planted."""
MEASURED = {"memory", "room", "sync"}
"""What is found of the machine that the tests run on."""

Plant = Callable[[shoal.World, ExitStack], None]


def examined(
    world: shoal.World, request: DoctorRequest, plants: Sequence[Plant]
) -> tuple[Examination | None, bool]:
    """What each rank of three hosts finds, of which the last has the faults."""
    with ExitStack() as stack:
        stack.enter_context(patch("socket.gethostname", lambda: f"node{world.rank}"))
        for plant in plants:
            plant(world, stack)
        return examine_together(world, replace(request, source=_source(request, world.rank)))


def _source(request: DoctorRequest, rank: int) -> Path | None:
    return request.source and request.source / str(rank)


def find(ranks: Ranks, request: DoctorRequest, *plants: Plant) -> Examination:
    ranks.divide("replicate=-1")
    (found, hangs), *others = ranks.call(examined, request, plants)
    assert others == [(None, hangs)] * (RANKS - 1)
    assert not hangs
    assert isinstance(found, Examination)
    return found


def bad(found: Examination) -> dict[str, tuple[Severity, str]]:
    grave = [one for one in found.findings if one.state is not Severity.OK]
    return {one.what: (one.state, one.found) for one in grave}


def other_package(world: shoal.World, stack: ExitStack) -> None:
    if world.rank == ODD:
        known = {**packages(), "rich": "0.0.1", "numpy": "9"}
        stack.enter_context(patch.object(software, "packages", lambda: known))


def other_clock(world: shoal.World, stack: ExitStack) -> None:
    if world.rank == ODD:
        ahead = SimpleNamespace(wall_ns=lambda: time.time_ns() + 120 * 10**9)
        stack.enter_context(patch("shoal.tools.doctor.checks.links.CLOCK", ahead))


def no_rename(world: shoal.World, stack: ExitStack) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    if world.rank == ODD:
        stack.enter_context(patch.object(filesystem, "_rename", refuse))


def another_disk(world: shoal.World, stack: ExitStack) -> None:
    """A folder of the same name that is no shared one."""
    if world.rank == ODD:
        stack.enter_context(patch("shoal.tools.doctor.checks.filesystem._TEXT", "another"))


def no_lock(world: shoal.World, stack: ExitStack) -> None:
    if world.rank == ODD:
        stack.enter_context(patch("shoal.tools.doctor.checks.filesystem.fcntl.lockf", lambda *_: None))


def slow_device(world: shoal.World, stack: ExitStack) -> None:
    # All wait instead of computing, so that what else this machine does counts little.
    def wait(matrix: torch.Tensor) -> None:
        time.sleep(0.1 if world.rank == ODD else 0.02)

    stack.enter_context(patch.object(compute, "multiply", wait))


def hung_check(world: shoal.World, stack: ExitStack) -> None:
    if world.rank == ODD:
        stack.enter_context(patch("shoal.tools.doctor.checks.host.describe_memory", signal.pause))


def test_what_is_not_the_same_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(RANKS):
        (tmp_path / f"{rank}/lib").mkdir(parents=True)
        (tmp_path / f"{rank}/lib/net.py").write_text("x = 1" if rank != ODD else "x = 2")
        (tmp_path / f"{rank}/train.py").write_text("")
    request = DoctorRequest(source=tmp_path, data=tmp_path / "0", run=tmp_path / "run", quick=True)
    found = find(ranks, request, other_package, other_clock, no_rename, no_lock)
    told = {what: each for what, each in bad(found).items() if what not in MEASURED}
    assert set(told) == {"packages", "numpy", "source", "clock", "rename", "lock"}
    assert all("rank 2 (node2)" in text for _, text in told.values())
    assert "lib/net.py" in told["source"][1]
    assert "rich" in told["packages"][1]
    assert told["clock"] == (Severity.FAILURE, "rank 2 (node2) is 120 s ahead of rank 0 (node0)")
    assert "shared" in {one.what for one in found.findings}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_directory_that_not_all_see_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = find(ranks, DoctorRequest(run=tmp_path, quick=True, limit=8), another_disk)
    told = bad(found)["shared"]
    assert told == (Severity.FAILURE, "rank 2 (node2) did not see what rank 0 (node0) wrote")


def test_a_slow_device_is_named_after_it_was_slow_three_times(ranks: Ranks) -> None:
    found = find(ranks, DoctorRequest(), slow_device)
    state, text = bad(found)["compute"]
    assert (state, text.split(",")[0]) == (Severity.FAILURE, "rank 2 (node2)")
    assert {"links", "clock"} <= {one.what for one in found.findings}


def test_a_check_that_hangs_on_one_rank_is_a_line(ranks: Ranks) -> None:
    found = find(ranks, DoctorRequest(quick=True, limit=6), hung_check)
    assert bad(found)["memory"] == (
        Severity.FAILURE,
        "could not be checked on rank 2 (node2): not finished within 6 s",
    )


def one_core(world: shoal.World, stack: ExitStack) -> None:
    """All ranks of one machine bound to its first core, as by a launcher that binds each alike."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    stack.callback(os.sched_setaffinity, 0, before)
    stack.enter_context(patch("socket.gethostname", lambda: "node0"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_share_a_core_while_others_are_idle_are_named(ranks: Ranks) -> None:
    found = find(ranks, DoctorRequest(limit=30), one_core)
    state, text = bad(found)["cores"]
    assert (state, text.partition(" (")[0]) == (Severity.FAILURE, "3 ranks on 1 core")
    told = {one.what: one.found for one in found.findings}
    assert "not compared" in told["compute"]
    assert told["links"].startswith("not measured")


STOPPED = """
import os, signal, sys
from shoal.tools.doctor.checks import host, links
{where} = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
sys.argv = ["shoal", "doctor", "--limit", "1"]
from shoal.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "where", ["links.measure_links", pytest.param("host.describe_memory", marks=pytest.mark.long)]
)
def test_a_rank_that_stops_is_named_and_strict_ends_the_job(where: str) -> None:
    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = free_port()
    asked = [*SHOAL, "doctor", "--limit", "1", "--strict"]
    started = [
        subprocess.Popen(
            command,
            env=environment(**shared, COLUMNS=200, RANK=rank, LOCAL_RANK=rank),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate((asked, [sys.executable, "-c", STOPPED.format(where=where)]))
    ]
    try:
        text = started[0].communicate(timeout=200)[0]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert started[0].returncode == 1
    assert f"rank 1 ({socket.gethostname()}) did not complete a check" in text


def by_mpirun(run: str) -> dict[str, object]:
    names = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()} | {"PMIX_NAMESPACE": run}


def by_torchrun(run: str, port: int) -> dict[str, object]:
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    store = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": run}
    return {**names, **store, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_rank_that_never_comes_is_named(launcher: str, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = tmp_path.name
    variables = by_mpirun(run) if launcher == "mpirun" else by_torchrun(run, store.port)
    asked = [*SHOAL, "doctor", "--limit", "2", "--wait", "1", "--strict"]
    done = call(asked, COLUMNS=200, **variables)
    assert done.returncode == 1
    assert "rank 1 did not join the rendezvous" in done.stdout
    assert "open files" in done.stdout


def test_ranks_that_it_starts_by_itself_report_once(
    tmp_path: Path, start_command: Callable[..., Command]
) -> None:
    archive = tmp_path / "b.zip"
    words = ["-n", "2", "--quick", "--run", str(tmp_path / "run"), "--bundle", str(archive)]
    done = start_command([*SHOAL, "doctor", *words]).end()
    assert done.code == 0, done.err
    assert done.out.count("shoal doctor: ") == 1
    assert "on 2 ranks of 1 host" in done.out
    assert "the same on all 2 ranks" in done.out
    assert archive.stat().st_size > 0
    assert "environment.txt" in done.err
