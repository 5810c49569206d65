"""`shoal bench comm`: measure the collectives of this job, or of N local processes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from shoal.distributed import env_vars, link_speed
from shoal.distributed.device import backend_of
from shoal.distributed.init import init
from shoal.distributed.world import World
from shoal.launcher.local import run_job
from shoal.tools.bench.collectives.document import machine_document, point_csv_rows
from shoal.tools.bench.collectives.machine_file import (
    CollectiveSeries,
    LinkTable,
    MachineFile,
    write_machine_file,
)
from shoal.tools.bench.collectives.measure import OPERATIONS, measure_collectives
from shoal.tools.bench.measurement import Output, keep_on_interrupt
from shoal.tools.bench.options import check_output, check_seconds
from shoal.tools.bench.processor import processor_name
from shoal.util import accelerator
from shoal.util.arguments import check_integer
from shoal.util.clock import CLOCK, utc_now
from shoal.util.errors import LaunchError
from shoal.util.tables import plain_console, print_line
from shoal.util.units import binary_size

BACKENDS = ("mpi", "nccl", "gloo")
"""In order of preference: the first of those that are measured is the world's own, others are added."""
JOIN_SECONDS = 60.0
"""How long ranks wait for each other; it can be short, since no rank prepares data."""
GRACE = 30.0
"""How long ranks have, after Ctrl-C, to end their sample and write the results."""


@dataclass(frozen=True, kw_only=True)
class CollectivesRequest:
    """The measurements and their files. Without backends, the one that a script would get is used."""

    backends: tuple[str, ...]
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    repeats: int
    seconds: float
    pairs: bool
    out: Path | None
    output: Output
    name: str = "shoal-bench-comm"
    safe_path: bool = False

    def run(self) -> None:
        """Measure with the other local processes. A signal also reaches the launcher, which exits with
        it.
        """
        measure_on_ranks(self)


def benchmark_collectives(asked: CollectivesRequest, processes: int | None) -> int:
    """Measure in this job, or in `processes` on this machine, and return the exit code.

    Raises LaunchError for invalid options, for a single process, or if a backend can't work.
    """
    check_integer(LaunchError, "shoal bench comm", "--repeats", asked.repeats, 1, usual=20)
    check_seconds("shoal bench comm", "--seconds", asked.seconds)
    check_output("-o", asked.out)
    check_output("--csv", asked.output.csv)
    here = env_vars.placement()
    if here.size > 1 and processes is not None:
        raise LaunchError(
            given=f"shoal bench comm -n {processes}, on rank {here.rank} of {here.size}",
            found=f"{here.launcher} has already started all ranks",
            fix="remove -n",
        )
    if here.size == 1 and (processes is None or processes < 2):
        raise LaunchError(
            given="shoal bench comm" + (f" -n {processes}" if processes is not None else ""),
            found="a single process has no other to communicate with",
            fix="run shoal bench comm -n 2, or start one process per rank: srun shoal bench comm",
        )
    if processes is not None and "mpi" in asked.backends:
        raise LaunchError(
            given=f"shoal bench comm -n {processes} --backend {','.join(asked.backends)}",
            found="processes that Shoal starts are not ranks of MPI",
            fix=f"mpirun -n {processes} shoal bench comm --backend {','.join(asked.backends)}",
        )
    _check_backends(asked.backends)
    if processes is None:
        return measure_on_ranks(asked)
    _check_memory(max(asked.sizes), processes, len(asked.backends) or 1)
    return run_job(asked, processes=processes, grace=GRACE).code


def measure_on_ranks(asked: CollectivesRequest) -> int:
    """Join the ranks that a launcher started, measure, print on rank 0 and return the exit code."""
    chosen = [backend for backend in BACKENDS if backend in asked.backends]
    first = chosen[0] if chosen else None
    device = "cpu" if first in ("mpi", "gloo") else None
    with (
        keep_on_interrupt() as interrupts,
        init(backend=first, device=device, prepare_timeout=JOIN_SECONDS) as world,
    ):
        began, begun = utc_now(), CLOCK.now()
        screen = plain_console(stderr=True)
        outcome = measure_collectives(
            world,
            backends=chosen or [_backend(world)],
            operations=[each for each in OPERATIONS if each in (asked.operations or OPERATIONS)],
            sizes=asked.sizes,
            repeats=asked.repeats,
            seconds=asked.seconds,
            asked_to_stop=lambda: bool(interrupts.asked),
            tell=lambda text: print_line(screen, text) if world.is_rank_zero else None,
        )
        pairs = link_speed.pairs(world) if asked.pairs and outcome.complete else None
        machine = _describe(
            world, began, CLOCK.now() - begun, outcome.series, pairs, complete=outcome.complete
        )
        if world.is_rank_zero:
            _report(asked, machine, outcome.left_out, pairs)
        return 128 + (interrupts.asked or signal.SIGINT) if not outcome.complete else 0


def _describe(
    world: World,
    began: datetime,
    seconds: float,
    series: tuple[CollectiveSeries, ...],
    pairs: link_speed.LinkMeasurements | None,
    *,
    complete: bool,
) -> MachineFile:
    interface = [choice.value for choice in world.decisions if choice.what == "interface"]
    return MachineFile(
        measured=began.isoformat(timespec="seconds"),
        seconds=seconds,
        complete=complete,
        shoal=version("shoal"),
        torch=torch.__version__,
        launcher=world.placement.launcher,
        hosts=tuple(world.gather(socket.gethostname())),
        device=world.device.type,
        device_name=accelerator.name(world.device) or processor_name() or world.device.type,
        cores=world.placement.cores,
        threads=torch.get_num_threads(),
        interface=str(interface[0]) if interface else "",
        series=series,
        links=None
        if pairs is None
        else LinkTable(
            backend=_backend(world),
            bytes=pairs.bytes,
            bandwidth=pairs.bandwidth,
            latency=pairs.latency,
        ),
    )


def _report(
    asked: CollectivesRequest,
    machine: MachineFile,
    left_out: Sequence[tuple[str, str, int]],
    pairs: link_speed.LinkMeasurements | None,
) -> None:
    """Write the files and print the results, on rank 0."""
    if not machine.series:
        print_line(plain_console(stderr=True), "Ended before the first measurement: no file written.")
        return
    stamp = datetime.fromisoformat(machine.measured).strftime("%Y%m%d-%H%M%S")
    path = asked.out or Path(f"machine-{machine.hosts[0]}-{len(machine.hosts)}-{stamp}.json")
    write_machine_file(machine, path)
    asked.output.show(machine_document(machine, left_out, pairs, path), point_csv_rows(machine))


def _backend(world: World) -> str:
    name = "gloo" if world.group is None else backend_of(world.group, world.device)
    return name if name in BACKENDS else "mpi"


def _check_backends(backends: Sequence[str]) -> None:
    """Raise LaunchError for NCCL if torch lacks it or there is no GPU."""
    if "nccl" not in backends:
        return
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        built = dist.is_nccl_available()
        raise LaunchError(
            given="--backend nccl",
            found=f"torch {torch.__version__} sees no GPU on {socket.gethostname()}"
            if built
            else f"torch {torch.__version__} is built without it",
            fix="--backend gloo",
        )


def _check_memory(largest: int, processes: int, backends: int) -> None:
    """Raise LaunchError unless two tensors of the largest size fit for each process and backend."""
    needed, free = 2 * largest * processes * backends, psutil.virtual_memory().available
    if needed > free:
        raise LaunchError(
            given=f"messages of {binary_size(largest)}, {processes} processes",
            found=f"they need {binary_size(needed)} of memory; {binary_size(free)} are free",
            fix=f"--sizes 1KiB:{max(1, free // (needed // largest * 4) >> 20)}MiB",
        )
