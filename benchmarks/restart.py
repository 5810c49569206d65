"""Time until all ranks reduce again after SIGKILL of one, under `shoal run` and under torchrun.

    python benchmarks/restart.py [--ranks 4] [--rounds 3] [--kills 4] [--json]

A round starts the same script with either launcher. In each start `--kills` ranks kill themselves, one
after the other. The time is from just before a kill to the last rank's first all-reduce afterwards.
torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it its ranks on Gloo read the addresses
of the previous attempt and never connect. The ratio is that of the medians of each round. Budget at
four ranks: 2.5 s.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import alternate, finish, machine, parse, ratios, show, spread

BUDGET = 2.5
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
LAUNCHERS = {
    "shoal run": "-m shoal run -n {ranks} --restarts {kills}",
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node {ranks} --max-restarts {kills}",
}


def measure(launcher: str, ranks: int, kills: int) -> list[float]:
    """Return the seconds from each kill to the last rank's first all-reduce after it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        words = LAUNCHERS[launcher].format(ranks=ranks, kills=kills).split()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, *words, str(script), name, str(kills)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise SystemExit(f"{launcher}: exit code {done.returncode}\n{done.stderr}")

        def read(name: str) -> float:
            return float((folder / name).read_text())

        return [
            max(read(f"reduced-{kill + 1}-{rank}") for rank in range(ranks)) - read(f"killed-{kill}")
            for kill in range(kills)
        ]


def main() -> None:
    given = parse(__doc__, ranks=4, rounds=3, kills=4)
    turns = {name: partial(measure, name, given.ranks, given.kills) for name in LAUNCHERS}
    killed = alternate(turns, given.rounds)
    medians = {name: [statistics.median(each) for each in rounds] for name, rounds in killed.items()}
    seconds = {name: [each for found in rounds for each in found] for name, rounds in killed.items()}
    rows = [
        {
            "launcher": name,
            "seconds": spread(own),
            "/ torchrun": spread(ratios(medians[name], medians["torchrun"])),
        }
        for name, own in seconds.items()
    ]
    show(f"SIGKILL of one of {given.ranks} ranks to all reducing again, {machine()}", rows)
    worst = max(seconds["shoal run"])
    print(f"budget {BUDGET} s: {'kept' if worst <= BUDGET else 'exceeded'}, at worst {worst:.2f} s")
    finish(given, {"restart": rows})


if __name__ == "__main__":
    main()
