"""Communication between ranks through MPI compared with Gloo, alternating in one run.

    python benchmarks/mpi.py [--mpirun "mpirun --oversubscribe"] [--ranks 2 4] [--rounds 15] [--json]

All-reduces of 4 B to 64 MiB of float32, and a step of torch's DDP on a network of 1.3 million
parameters, over a process group of each kind of the same ranks. A round does both, in an order that
changes; ratios of MPI's time to Gloo's are taken within rounds. On one machine MPI uses shared memory
and Gloo the loopback interface. If there are more ranks than cores, ranks wait for each other's CPU
time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.distributed.watchdog.world_watchdog import CHECKED_STEPS
from spread import quartiles

SIZES = (4, 1 << 10, 1 << 15, 1 << 20, 1 << 23, 1 << 26)
SECONDS = 0.02
"""Minimum duration of a measurement in a round, estimated from the first tries."""
WIDTH, LAYERS, BATCH = 512, 4, 32


def repeated(action: Callable[[], object], times: int) -> float:
    """Return the seconds per call, of `times` calls begun by all ranks together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times


def reducing(size: int, group: Any) -> Callable[[], object]:
    tensor = torch.zeros(size // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def stepping(group: Any) -> Callable[[], object]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(name: str, ours: Callable[[], object], gloo: Callable[[], object], rounds: int) -> Any:
    """Return microseconds of both and their ratio, those of the slowest rank."""
    once = max(repeated(ours, 2), repeated(gloo, 2))
    times = torch.tensor(max(1, int(SECONDS / once)))
    dist.broadcast(times, 0)
    taken = torch.zeros(rounds, 2)
    for round_ in range(rounds):
        for which in sorted((0, 1), reverse=bool(round_ % 2)):
            taken[round_, which] = repeated((ours, gloo)[which], int(times))
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    mpi, other = taken.T
    return {
        "what": name,
        "MPI, us": asdict(quartiles((mpi * 1e6).tolist())),
        "Gloo, us": asdict(quartiles((other * 1e6).tolist())),
        "ratio": asdict(quartiles((mpi / other).tolist())),
    }


def measure(rounds: int, results: Path) -> None:
    """Measure on each rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    with shoal.init(backend="mpi") as world:
        gloo = dist.new_group(backend="gloo")
        for _ in range(CHECKED_STEPS + 2):
            world.watchdog.begin_step()
        rows = [
            compare(f"all-reduce, {size} B", reducing(size, None), reducing(size, gloo), rounds)
            for size in SIZES
        ]
        rows.append(compare("DDP step", stepping(None), stepping(gloo), rounds))
        backend = next(choice for choice in world.decisions if choice.what == "backend")
        if world.is_rank_zero:
            results.write_text(json.dumps({"stands on": backend.reason, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mpirun", default="mpirun --oversubscribe --bind-to none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results:
        measure(options.rounds, options.results)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        for ranks in options.ranks:
            command = [*shlex.split(options.mpirun), "-n", str(ranks), sys.executable, __file__]
            command += ["--rounds", str(options.rounds), "--results", str(results)]
            subprocess.run(command, check=True, timeout=600)
            found[str(ranks)] = json.loads(results.read_text())
            print(
                f"{ranks} ranks on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f};"
            )
            print(f"{found[str(ranks)]['stands on']}; median and quartiles of {options.rounds} rounds")
            for row in found[str(ranks)]["rows"]:
                ratio, mpi, gloo = row["ratio"], row["MPI, us"]["median"], row["Gloo, us"]["median"]
                print(f"  {row['what']:24} MPI {mpi:9.0f} us  Gloo {gloo:9.0f} us", end="  ")
                print(f"ratio {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
