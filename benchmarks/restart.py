"""Time until all ranks reduce again after SIGKILL of one, under `shoal run` and under torchrun.

    python benchmarks/restart.py [--ranks 4] [--rounds 3] [--kills 4] [--json]

A round starts the same script with either launcher, in an order that alternates. In each start
`--kills` ranks kill themselves, one after the other. The time is from just before a kill to the last
rank's first all-reduce afterwards. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it
its ranks on Gloo read the addresses of the previous attempt and never connect. The last column divides
the medians of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BUDGET = 2.5
"""Seconds, at four ranks."""

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

here, kills = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="env://")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
one = torch.ones(1)
dist.all_reduce(one)
(here / f"reduced-{attempt}-{rank}").write_text(str(time.monotonic()))
dist.barrier()
if attempt < kills:
    if rank == attempt % dist.get_world_size():
        (here / f"killed-{attempt}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(one)
dist.barrier()
dist.destroy_process_group()
"""


def command(launcher: str, ranks: int, kills: int) -> list[str]:
    """Return the command line of the launcher before the script."""
    if launcher == "shoal run":
        return [
            sys.executable,
            "-m",
            "shoal",
            "run",
            "-n",
            f"{ranks}",
            "--restarts",
            f"{kills}",
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", f"{ranks}", "--max-restarts", f"{kills}"),
    ]


def measure(launcher: str, ranks: int, kills: int) -> list[float]:
    """Return the seconds from each kill to the last rank's first all-reduce after it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        words = [*command(launcher, ranks, kills), str(script), name, str(kills)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(f"{launcher}: exit code {done.returncode}\n{done.stderr}")

        def read(name: str) -> float:
            return float((folder / name).read_text())

        return [
            max(read(f"reduced-{kill + 1}-{rank}") for rank in range(ranks)) - read(f"killed-{kill}")
            for kill in range(kills)
        ]


def main() -> None:
    """Measure, print a table, and with --json the figures as one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4, help="in each start")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    options = parser.parse_args()
    launchers = ["shoal run", "torchrun"]
    times: dict[str, list[float]] = {launcher: [] for launcher in launchers}
    ratios = []
    for round_ in range(options.rounds):
        medians = {}
        for launcher in launchers[:: 1 if round_ % 2 == 0 else -1]:
            found = measure(launcher, options.ranks, options.kills)
            times[launcher] += found
            medians[launcher] = statistics.median(found)
            print(f"{launcher:>9}:", *(f"{value:.2f}" for value in found), "s", flush=True)
        ratios.append(medians["shoal run"] / medians["torchrun"])
    print(f"\nSIGKILL of one of {options.ranks} ranks to all reducing again, seconds")
    print(f"{'':>10}{'median':>8}{'worst':>8}{'kills':>7}")
    for launcher, found in times.items():
        print(f"{launcher:>10}{statistics.median(found):8.2f}{max(found):8.2f}{len(found):7}")
    ratio = statistics.median(ratios)
    print(f"{'ratio':>10}{ratio:8.2f}   (rounds: {', '.join(f'{each:.2f}' for each in ratios)})")
    worst = max(times["shoal run"])
    print(f"budget {BUDGET} s: {'kept' if worst <= BUDGET else 'exceeded'}, at worst {worst:.2f} s")
    if options.json:
        print(json.dumps({"ranks": options.ranks, "seconds": times, "ratio": ratio, "budget": BUDGET}))


if __name__ == "__main__":
    main()
