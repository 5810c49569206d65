"""Time from the command to the first all-reduce of the slowest rank: `shoal run` and `torchrun`.

Both start the same script, in turn, so that both see the same machine. Aims: `shoal run` at most
0.6 x torchrun's time, `shoal --help` under 0.3 s.

    python benchmarks/start.py [--processes 2] [--repeats 7] [--json]
    python benchmarks/start.py --scale 1 2 4 8 16 32 64 [--repeats 3] [--json]

With `--scale`, N processes are started at once, each with its own imports, as under srun and mpirun.
The output has the seconds of processor time that the imports take in a rank, the seconds until the
slowest has imported, and those from there until `shoal.init` and a first barrier are over on all ranks.
For more ranks, and nodes of c cores with r ranks each, the start is modelled as

    imports x max(1, r / c) + a + b x ranks

where `imports` is the median of the processor time, and a and b are a least-squares fit to the
measurements. All ranks use this machine's cores, so b is larger than on separate machines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import Spread, alternate, finish, machine, parse, ratios, show, spread
from helpers.ranks import free_port

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
dist.all_reduce(torch.ones(1))
# perf_counter is one clock for all processes of a Linux machine.
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(time.perf_counter()))
dist.destroy_process_group()
"""
RANK = """
import json, os, sys, time

begun = float(sys.argv[2])
import shoal
from shoal import init
spent, imported = time.process_time(), time.perf_counter()
with init() as world:
    world.barrier()
    formed = time.perf_counter()
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([spent, imported - begun, formed - begun], file)
"""
PARTS = ("imports, processor", "imports, slowest", "forming")
BEYOND = (256, 1024)
SHOAL = [sys.executable, "-m", "shoal"]


def first_reduce(command: Sequence[str], script: Path, processes: int) -> float:
    """Return the seconds from starting `command` to the end of its slowest rank's first all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [*command, str(script), folder], check=True, stderr=subprocess.DEVNULL, timeout=120
        )
        ends = [float(path.read_text()) for path in Path(folder).iterdir()]
    if len(ends) != processes:
        raise RuntimeError(f"{len(ends)} of {processes} ranks reported")
    return max(ends) - started


def together(processes: int, script: Path) -> tuple[float, float, float]:
    """Start ranks at once; return the seconds of PARTS."""
    with tempfile.TemporaryDirectory() as folder:
        size = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "OMP_NUM_THREADS": "1",
        }
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        begun = time.perf_counter()
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), folder, str(begun)],
                env=os.environ | size | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(processes)
        ]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}")
        each = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    spent, imported, formed = zip(*each, strict=True)
    return statistics.median(spent), max(imported), max(formed) - max(imported)


def scale(sizes: Sequence[int], repeats: int, script: Path) -> dict[str, Any]:
    """Return the durations of PARTS for each number of processes, and the model."""
    script.write_text(RANK)
    together(1, script)  # for the file system's cache
    turns = {str(size): partial(together, size, script) for size in sizes}
    rows = []
    for size, rounds in alternate(turns, repeats).items():
        parts = map(spread, zip(*rounds, strict=True))
        rows.append({"processes": int(size), **dict(zip(PARTS, parts, strict=True))})
    show(f"median (lowest to highest) of {repeats}, in seconds; {machine()}", rows)
    imports, base, slope = modelled(rows)
    print(f"modelled: {imports:.2f} x max(1, r / c) + {base:.2f} + {slope:.4f} x ranks;", end=" ")
    print(", ".join(f"{n}: {imports + base + slope * n:.1f} s" for n in BEYOND), "with a core for each")
    return {"measured": rows, "imports": imports, "a": base, "b": slope}


def modelled(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the imports, a and b of the model, in seconds, from sizes of at least two processes."""
    imports = statistics.median(row[PARTS[0]].median for row in rows)
    forming = {row["processes"]: row["forming"].median for row in rows if row["processes"] > 1}
    if len(forming) < 2:
        return imports, sum(forming.values()), 0.0
    slope, base = statistics.linear_regression(list(forming), list(forming.values()))
    return imports, base, slope


def duration(command: Sequence[str]) -> float:
    """Return the seconds of a command from start to end."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def compare(processes: int, repeats: int, script: Path) -> dict[str, Spread]:
    """Return the seconds of the launchers and of short commands, and the ratio of the launchers."""
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    torchrun.append(f"--master-port={free_port()}")  # its static rendezvous finds none by itself
    launchers = {"shoal run": [*SHOAL, "run", "-n", str(processes)], "torchrun": torchrun}
    commands = {"shoal --help": [*SHOAL, "--help"], "python -c pass": [sys.executable, "-c", ""]}
    actions = {name: partial(first_reduce, each, script, processes) for name, each in launchers.items()}
    actions |= {name: partial(duration, each) for name, each in commands.items()}
    # Once each for the file system's cache, uncounted.
    times = alternate(actions, repeats, uncounted=1)
    times["shoal run / torchrun"] = ratios(times["shoal run"], times["torchrun"])
    return {name: spread(values) for name, values in times.items()}


def main() -> None:
    given = parse(__doc__, processes=2, repeats=7, scale=[0])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        if any(given.scale):
            finish(given, scale(given.scale, given.repeats, script))
            return
        figures = compare(given.processes, given.repeats, script)
    title = f"{given.processes} processes; median (lowest to highest) of {given.repeats}, in seconds"
    show(f"{title}; {machine()}", [{"what": name, "": value} for name, value in figures.items()])
    finish(given, figures)


if __name__ == "__main__":
    main()
