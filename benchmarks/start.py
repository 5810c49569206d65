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

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from spread import Spread, spread

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
BEYOND = (256, 1024)


def together(processes: int, script: Path) -> tuple[float, float, float]:
    """Start ranks at once; return seconds: processor time of imports, slowest imports, forming."""
    with tempfile.TemporaryDirectory() as folder:
        port, begun = str(free_port()), time.perf_counter()
        size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
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


def scale(sizes: Sequence[int], repeats: int) -> dict[str, dict[str, Spread]]:
    """Return the three durations of `together` for each number of processes."""
    found: dict[int, list[tuple[float, float, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)
        together(1, script)  # for the file system's cache
        for _ in range(repeats):
            for size in sizes:
                found[size].append(together(size, script))
    names = ("imports, processor", "imports, slowest", "forming")
    return {
        str(size): dict(zip(names, map(spread, zip(*values, strict=True)), strict=True))
        for size, values in found.items()
    }


def modelled(found: dict[str, dict[str, Spread]]) -> tuple[float, float, float]:
    """Return the imports, a and b of the model, in seconds, from sizes of at least two processes."""
    imports = statistics.median(each["imports, processor"].median for each in found.values())
    forming = {int(size): each["forming"].median for size, each in found.items() if size != "1"}
    if len(forming) < 2:
        return imports, sum(forming.values()), 0.0
    slope, base = statistics.linear_regression(list(forming), list(forming.values()))
    return imports, base, slope


def show_scale(sizes: Sequence[int], repeats: int, *, as_json: bool) -> None:
    found = scale(sizes, repeats)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f};", end=" ")
    print(f"median (lowest to highest) of {repeats}, in seconds")
    for size, durations in found.items():
        for name, values in durations.items():
            print(f"  {size:>4} processes, {name:20} {values}")
    imports, base, slope = modelled(found)
    print(f"modelled: {imports:.2f} x max(1, r / c) + {base:.2f} + {slope:.4f} x ranks;", end=" ")
    print(", ".join(f"{n}: {imports + base + slope * n:.1f} s" for n in BEYOND), "with a core for each")
    if as_json:
        plain = {size: {name: asdict(v) for name, v in each.items()} for size, each in found.items()}
        print(json.dumps({"measured": plain, "imports": imports, "a": base, "b": slope}))


def free_port() -> int:
    """Return a port that is free now; the static rendezvous of torchrun finds none by itself."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def duration(command: Sequence[str]) -> float:
    """Return the seconds of a command from start to end."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def measure(processes: int, repeats: int) -> dict[str, Spread]:
    shoal = [sys.executable, "-m", "shoal"]
    runs = {
        "shoal run": [*shoal, "run", "-n", str(processes)],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(processes), "--master-port", str(free_port())),
        ],
    }
    commands = {"shoal --help": [*shoal, "--help"], "python -c pass": [sys.executable, "-c", ""]}
    times: dict[str, list[float]] = {name: [] for name in (*runs, *commands)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "reduce.py"
        script.write_text(SCRIPT)
        # Once each for the file system's cache, uncounted.
        for repeat in range(-1, repeats):
            # In turn, and each is first half of the time, so that neither always follows the other.
            for name in sorted(runs, reverse=bool(repeat % 2)):
                value = first_reduce(runs[name], script, processes)
                times[name] += [value] if repeat >= 0 else []
            for name, command in commands.items():
                value = duration(command)
                times[name] += [value] if repeat >= 0 else []
    figures = {name: spread(values) for name, values in times.items()}
    pairs = zip(times["shoal run"], times["torchrun"], strict=True)
    figures["shoal run / torchrun"] = spread([ours / theirs for ours, theirs in pairs])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scale", type=int, nargs="+", metavar="N", help="numbers of ranks to start")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if options.scale:
        show_scale(options.scale, options.repeats, as_json=options.json)
        return
    figures = measure(options.processes, options.repeats)
    print(f"{options.processes} processes on {len(os.sched_getaffinity(0))} cores;", end=" ")
    print(f"median (lowest to highest) of {options.repeats}, in seconds")
    for name, values in figures.items():
        print(f"  {name:22} {values}")
    if options.json:
        print(json.dumps({name: asdict(values) for name, values in figures.items()}))


if __name__ == "__main__":
    main()
