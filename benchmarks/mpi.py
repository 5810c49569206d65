"""Communication between ranks through MPI compared with Gloo, alternating in one run.

    python benchmarks/mpi.py [--mpirun "mpirun --oversubscribe"] [--ranks 2 4] [--rounds 15] [--json]

All-reduces of 4 B to 64 MiB of float32, and a step of torch's DDP on a network of 1.3 million
parameters, over a process group of each kind of the same ranks. On one machine MPI uses shared memory
and Gloo the loopback interface. If there are more ranks than cores, ranks wait for each other's CPU
time.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show, timed
from loops import adamw, stack
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS

SIZES = [4, 1 << 10, 1 << 15, 1 << 20, 1 << 23, 1 << 26]
SECONDS = 0.02
"""Minimum duration of a measurement in a round, estimated from the first tries."""
WIDTH, LAYERS, BATCH = 512, 4, 32


def reducing(size: int, group: Any) -> Callable[[], object]:
    return partial(dist.all_reduce, torch.zeros(size // 4), group=group)


def stepping(group: Any) -> Callable[[], object]:
    model = nn.parallel.DistributedDataParallel(stack(WIDTH, LAYERS), process_group=group)
    optimizer = adamw(model.parameters())
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int, sizes: list[int], results: Path) -> None:
    """Measure on each rank; rank 0 writes the seconds of each kind in each round."""
    torch.set_num_threads(1)
    with shoal.init(backend="mpi") as world:
        gloo = dist.new_group(backend="gloo")
        for _ in range(CHECKED_STEPS + 2):
            world.watchdog.begin_step()
        makes: dict[str, Callable[[Any], Callable[[], object]]] = {}
        makes |= {f"all-reduce, {size} B": partial(reducing, size) for size in sizes}
        found = {}
        for what, make in {**makes, "DDP step": stepping}.items():
            actions = {"MPI": make(None), "Gloo": make(gloo)}
            once = max(timed(world, action, 2) for action in actions.values())
            times = max(1, int(SECONDS / once))
            turns = {name: partial(timed, world, action, times) for name, action in actions.items()}
            found[what] = alternate(turns, rounds)
        backend = next(choice for choice in world.decisions if choice.what == "backend")
        if world.is_rank_zero:
            results.write_text(json.dumps([backend.reason, found]))


def main() -> None:
    mpirun = "mpirun --oversubscribe --bind-to none"
    given = parse(__doc__, mpirun=mpirun, ranks=[2, 4], sizes=SIZES, rounds=15, results=Path)
    if given.results:  # on a rank
        measure(given.rounds, given.sizes, given.results)
        return
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        for ranks in given.ranks:
            command = [*shlex.split(given.mpirun), "-n", str(ranks), sys.executable, __file__]
            command += ["--rounds", str(given.rounds), "--results", str(results)]
            command += ["--sizes", *map(str, given.sizes)]
            subprocess.run(command, check=True, timeout=600)
            backend, found = json.loads(results.read_text())
            rows = figures[str(ranks)] = [
                {"what": what}
                | {f"{name}, µs": quartiles([1e6 * t for t in own]) for name, own in times.items()}
                | {"MPI / Gloo": quartiles(ratios(times["MPI"], times["Gloo"]))}
                for what, times in found.items()
            ]
            show(f"{ranks} ranks, {backend}, {machine()}", rows)
    finish(given, figures)


if __name__ == "__main__":
    main()
