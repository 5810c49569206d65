"""Starts: size of the installation, imports, and seconds to the first all-reduce, also after a kill.

    python benchmarks/start.py [-n 2] [--rounds 7] [--kills 0] [--json]

Sizes: Shoal's own files, and for each installed dependency the files in its RECORD; torch and its own
dependencies are left out. Imports: new processes; a training rank uses every name that
examples/digits.py uses. Aim: `shoal --help` under 0.3 s.

Launchers: `shoal run` and torchrun start the same script, in which `--kills` ranks kill themselves with
SIGKILL, one after the other. The first time is from the command to the end of the last rank's first
all-reduce, the other one from just before a kill. torchrun runs with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, its ranks on Gloo read the addresses of the previous
attempt and never connect. Aims: 0.6 times torchrun's time to start, and 2.5 s after a kill of one of
four ranks.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import shoal
from harness import ROOT, alternate, finish, machine, parse, ratios, show, spread

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
        (here / f"killed-{attempt + 1}").write_text(str(time.monotonic()))
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


def launch(launcher: str, ranks: int, kills: int) -> list[float]:
    """Return the seconds from the start, and from each kill, to the last rank's first all-reduce."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        words = LAUNCHERS[launcher].format(ranks=ranks, kills=kills).split()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, *words, str(folder / "script.py"), name, str(kills)]
        (folder / "killed-0").write_text(str(time.monotonic()))
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise SystemExit(f"{launcher}: exit code {done.returncode}\n{done.stderr}")

        def read(name: str) -> float:
            return float((folder / name).read_text())

        return [
            max(read(f"reduced-{kill}-{rank}") for rank in range(ranks)) - read(f"killed-{kill}")
            for kill in range(kills + 1)
        ]


def launcher_rows(ranks: int, kills: int, rounds: int) -> list[dict[str, Any]]:
    turns = {name: partial(launch, name, ranks, kills) for name in LAUNCHERS}
    times = alternate(turns, rounds, uncounted=1)  # the first ones fill the file system's cache
    first = {name: [each[0] for each in found] for name, found in times.items()}
    rows = []
    for name, found in times.items():
        row = {"launcher": name, "start, s": spread(first[name])}
        row["/ torchrun"] = spread(ratios(first[name], first["torchrun"]))
        if kills:
            medians = {who: [statistics.median(each[1:]) for each in own] for who, own in times.items()}
            row["after a kill, s"] = spread([seconds for each in found for seconds in each[1:]])
            row["its median / torchrun"] = spread(ratios(medians[name], medians["torchrun"]))
        rows.append(row)
    return rows


def dependencies(of: str) -> set[str]:
    """Return the installed distributions that one depends on, recursively, except torch."""
    found: set[str] = set()
    asked = [of]
    while asked:
        for requirement in metadata.requires(asked.pop()) or ():
            name = re.split(r"[^\w.-]", requirement)[0].lower()
            wanted = "extra ==" not in requirement and name != "torch" and name not in found
            if wanted and any(True for _ in metadata.Distribution.discover(name=name)):
                found.add(name)
                asked.append(name)
    return found


def size_rows() -> list[dict[str, Any]]:
    # An editable installation's RECORD doesn't list Shoal's files.
    own = [path for path in Path(shoal.__file__).parent.rglob("*") if path.is_file()]
    sizes = {"shoal": [path.stat().st_size for path in own if path.suffix != ".pyc"]}
    for name in dependencies("shoal"):
        recorded = metadata.files(name) or ()
        sizes[name] = [file.size or 0 for file in recorded if file.suffix != ".pyc"]
    rows = [{"package": n, "MiB": sum(of) / 2**20, "files": len(of)} for n, of in sizes.items()]
    return sorted(rows, key=lambda row: -float(str(row["MiB"])))


def import_rows(rounds: int) -> list[dict[str, Any]]:
    example = (ROOT / "examples" / "digits.py").read_text()
    names = sorted(set(re.findall(r"\bshoal\.(\w+)", example)))
    codes = {
        "python": ["-c", ""],
        "import shoal": ["-c", "import shoal"],
        "import torch": ["-c", "import torch"],
        "a training rank": ["-c", "; ".join(["import torch, shoal", *(f"shoal.{n}" for n in names)])],
        "shoal --help": ["-m", "shoal", "--help"],
    }

    def seconds(arguments: list[str]) -> float:
        started = time.perf_counter()
        command = [sys.executable, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        return time.perf_counter() - started

    times = alternate({name: partial(seconds, c) for name, c in codes.items()}, rounds, uncounted=1)
    return [{"process": name, "seconds": spread(values)} for name, values in times.items()]


def main() -> None:
    given = parse(__doc__, processes=2, rounds=7, kills=0)
    figures = {
        "sizes": size_rows(),
        "imports": import_rows(given.rounds),
        f"{given.processes} processes": launcher_rows(given.processes, given.kills, given.rounds),
    }
    for title, rows in figures.items():
        show(f"{title}; {machine()}", rows)
    finish(given, figures)


if __name__ == "__main__":
    main()
