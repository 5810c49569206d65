"""From the command to the first all-reduce of the slowest rank: `shoal run` beside `torchrun`.

Both start the same script, in turn, so that both see the same machine. Aims: `shoal run` at most
0.6 x torchrun's time, `shoal --help` under 0.3 s.

    python benchmarks/start.py [--processes 2] [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
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
    """Seconds from starting `command` to the end of its slowest rank's first all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [*command, str(script), folder], check=True, stderr=subprocess.DEVNULL, timeout=120
        )
        ends = [float(path.read_text()) for path in Path(folder).iterdir()]
    if len(ends) != processes:
        raise RuntimeError(f"{len(ends)} of {processes} ranks reported")
    return max(ends) - started


def free_port() -> int:
    """A port that is free now; the static rendezvous of torchrun finds none by itself."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def duration(command: Sequence[str]) -> float:
    """Seconds that a command takes from start to end."""
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
            # In turn, and each first half of the time, so that neither always follows the other.
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
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    figures = measure(options.processes, options.repeats)
    print(f"{options.processes} processes on {len(os.sched_getaffinity(0))} cores;", end=" ")
    print(f"median (lowest to highest) of {options.repeats}, in seconds")
    for name, values in figures.items():
        print(f"  {name:22} {values}")
    if options.json:
        print(json.dumps({name: asdict(values) for name, values in figures.items()}))


if __name__ == "__main__":
    main()
