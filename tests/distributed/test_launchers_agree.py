"""One script, one result: however its processes were started, each on cores of its own."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Ended, wait_for
from helpers.mpirun import PROGRAMS
from helpers.mpirun import command as mpi
from helpers.scripts import AGREEING, LAUNCHERS, Script, trained, trained_alone
from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry.events import path_of, read_events
from shoal.tools.report.last_exit import last_exit

pytestmark = pytest.mark.processes

# What a person has in the environment, and not what started these tests.
FOREIGN = ("OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI", "OMPI_", "MPI_")

CORES = """
import os, sys
import torch, shoal

with shoal.init() as world:
    torch.ones(100, 100) @ torch.ones(100, 100)
    mine = (sorted(os.sched_getaffinity(0)), torch.get_num_threads(), world.placement.cores)
    world.print(repr(world.gather(mine)))
"""


@pytest.fixture(autouse=True, scope="module")
def environment() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(FOREIGN)]:
            patch.delenv(name)
        yield


def reached(ended: Ended) -> list[float]:
    assert ended.code == 0, ended.err
    (found,) = trained(ended.out)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: None) -> list[float]:
    """What one process reaches, started by nobody."""
    return trained_alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.full
def test_shoal_run_and_torchrun(alone: list[float], start: Callable[..., Script]) -> None:
    for launcher in ("shoal run", "torchrun"):
        assert reached(start(AGREEING, launcher, "2", "0", launcher).end()) == alone


@pytest.mark.long
def test_a_notebook(alone: list[float], tmp_path: Path) -> None:
    """The same function, defined in one cell and launched in another."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "import sys; sys.argv = ['notebook', '2', '0', 'run']",
        AGREEING.removesuffix("main()\n"),
        "print(shoal.launch(main, processes=2))",
    ]
    assert cells[1] != AGREEING
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute(
        env=dict(os.environ)
    )
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert trained(said) == [alone]
    assert said.endswith("\n[None, None]\n")


@pytest.mark.system
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("mpirun", PROGRAMS)
def test_mpirun(
    mpirun: str, processes: int, alone: list[float], start: Callable[..., Script], tmp_path: Path
) -> None:
    ranks = mpi(mpirun, processes, tmp_path)
    assert reached(start(AGREEING, ranks, str(processes), "0", "run").end()) == alone


@pytest.mark.system
@pytest.mark.parametrize(
    ("launcher", "no_time"),
    [
        ("shoal run", ["--grace", "0.001"]),
        ("torchrun", ["--shutdown-timeout", "0"]),
        ("mpirun.openmpi", ["--mca", "odls_base_sigkill_timeout", "0"]),
        ("mpirun.mpich", []),
    ],
)
def test_a_preemption_in_the_middle(
    launcher: str,
    no_time: list[str],
    alone: list[float],
    start: Callable[..., Script],
    tmp_path: Path,
) -> None:
    """Whatever the launcher exits with, the ranks' records tell that the same command may go on.

    It is said at the start if a save like the last one would take longer than the launcher waits.
    """
    command = [*LAUNCHERS[launcher], "2"] if launcher in LAUNCHERS else mpi(launcher, 2, tmp_path)
    place = -2 if launcher in LAUNCHERS else -3  # before the number of processes
    job = start(AGREEING, command, "2", "2", "run")
    record = path_of(tmp_path / "run", 0)
    wait_for(lambda: record.exists() and 2 in {event.get("step") for event in read_events(record)})
    job.process.send_signal(signal.SIGTERM if launcher == "torchrun" else signal.SIGUSR1)
    assert trained(job.end().out) == []
    assert last_exit(tmp_path / "run").code == REQUEUE
    ended = start(AGREEING, [*command[:place], *no_time, *command[place:]], "2", "0", "run").end()
    assert reached(ended) == alone
    assert ended.out.count("after SIGTERM, before they have saved: ") == bool(no_time)
    assert last_exit(tmp_path / "run").code == 0


@pytest.mark.system
@pytest.mark.parametrize("mpirun", [PROGRAMS[0], pytest.param(PROGRAMS[1], marks=pytest.mark.long)])
def test_two_jobs_on_one_machine_do_not_clash(
    mpirun: str, alone: list[float], start: Callable[..., Script], tmp_path: Path
) -> None:
    """FAILURES 16: even where there are hardly enough ports for both."""
    ranks = mpi(mpirun, 2, tmp_path, "SHOAL_PORTS=17301-17304")
    jobs = [start(AGREEING, ranks, "2", "0", name) for name in ("one", "two")]
    assert [reached(job.end()) for job in jobs] == [alone] * 2


CPUS = os.sched_getaffinity(0)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two cores")
@pytest.mark.parametrize("launcher", ["shoal run", "torchrun"])
@pytest.mark.full
def test_no_two_ranks_share_a_core_while_others_idle(
    launcher: str, start: Callable[..., Script]
) -> None:
    """FAILURES 27."""
    ended = start(CORES, launcher).end()
    first, second = ast.literal_eval(ended.out)
    if launcher == "shoal run":
        assert set(first[0]).isdisjoint(second[0])
        assert {*first[0], *second[0]} == CPUS
    # torchrun sets OMP_NUM_THREADS=1; with two cores that is also the rank's number.
    assert [first[1], second[1]] == [first[2], second[2]]
    assert first[2] + second[2] == len(CPUS) - len(CPUS) % 2
    assert ended.err.count("shoal: world size 2 on 1 node, launched by ") == 1


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two cores")
@pytest.mark.full
def test_threads_of_ones_own_are_kept(start: Callable[..., Script]) -> None:
    shoal_run = ["env", "OMP_NUM_THREADS=2", *LAUNCHERS["shoal run"], "2"]
    for affinity, threads, _ in ast.literal_eval(start(CORES, shoal_run).end().out):
        assert threads == 2
        assert len(affinity) >= 2  # not bound to fewer cores than that
