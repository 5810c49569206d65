"""Time and memory of `shoal report` on the events of a large run.

    python benchmarks/report.py [--ranks 64] [--steps 100000] [--json]

It writes such a run, in which rank 3 computes more slowly from the middle on, and reports on it in
separate processes: as a page, as text and as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
KINDS = 4
"""Number of ranks that are generated; the others are copies of these."""
SLOW = 3


@dataclass(frozen=True)
class Measured:
    """Seconds, core seconds and MiB of a command, and the verdict that it printed."""

    form: str
    seconds: float
    cores: float
    memory: float
    verdict: str


def durations(steps: int) -> dict[str, NDArray[np.int64]]:
    """Return microseconds by part, [rank, step], of ranks that wait for each other in every step."""
    random = np.random.default_rng(0)
    typical = {"wait": 900, "forward": 41_000, "backward": 83_000, "update": 7_000}
    parts = {
        part: np.rint(usual * random.lognormal(0, 0.03, (KINDS, steps))).astype(np.int64)
        for part, usual in typical.items()
    }
    parts["forward"][SLOW, steps // 2 :] += 15_000
    arrived = parts["wait"] + parts["forward"] + parts["backward"]
    parts["communication"] = arrived.max(axis=0) - arrived + random.integers(9_000, 11_000, steps)
    parts["checkpoint"] = np.zeros_like(arrived)
    parts["checkpoint"][:, 999::1000] = 400_000
    parts["wall"] = sum(parts.values()) + random.integers(200, 400, steps)
    return parts


def blocks(parts: dict[str, NDArray[np.int64]], rank: int) -> list[str]:
    """Return the lines of a rank, except the one with its number."""
    steps = parts["wall"].shape[1]
    ticks = np.cumsum(parts["wall"][rank])
    loss = np.round(2 + 8 * np.exp(-np.arange(steps) / steps * 5), 6)
    found = []
    for begin in range(0, steps, BLOCK):
        chosen = slice(begin, begin + BLOCK)
        numbers = np.arange(1, steps + 1)[chosen]
        firsts = (numbers * 1024).tolist()
        event = {
            "event": "steps",
            "t": 1.7e9 + round(float(ticks[chosen][-1]) / 1e6, 6),
            "name": "step",
            "step": numbers.tolist(),
            "first": firsts,
            "size": [1024] * len(numbers),
            "share": [[first + 16 * rank, first + 16 * rank + 16] for first in firsts],
            "counted": [1024] * len(numbers),
            "loss": loss[chosen].tolist(),
            "norm": [0.731925] * len(numbers),
            "at": (ticks[chosen][-1] - ticks[chosen]).tolist(),
            **{part: values[rank, chosen].tolist() for part, values in parts.items()},
        }
        found.append(json.dumps(event))
    return found


def write(folder: Path, ranks: int, steps: int) -> int:
    """Write the events of a run; return their size in bytes."""
    parts = durations(steps)
    kinds = [blocks(parts, kind) for kind in range(KINDS)]
    (folder / "events").mkdir()
    for rank in range(ranks):
        start = {
            "event": "start",
            "t": 1.7e9,
            "began": 1.7e9,
            "format": 3,
            "rank": rank,
            "size": ranks,
            "host": f"node{rank // 4:02}",
            "step": 0,
            "batch_size": 1024,
            "layout": f"replicate={ranks}",
        }
        kind = rank if rank < KINDS else rank % (KINDS - 1)
        lines = [json.dumps(start), *kinds[kind]]
        (folder / "events" / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return sum(path.stat().st_size for path in folder.glob("events/*"))


def measure(folder: Path, form: str, options: list[str]) -> Measured:
    """Run the command and measure its time and memory."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "report", str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        printed = process.stdout.read() if process.stdout is not None else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"shoal report {' '.join(options)} failed")
    verdict = json.loads(printed)["verdict"] if form == "json" else printed.partition("\n")[0]
    seconds = time.perf_counter() - begun
    return Measured(form, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        size = write(folder, options.ranks, options.steps)
        print(f"{options.ranks} ranks, {options.steps:,} steps: {size / 1e6:,.0f} MB of events")
        forms: dict[str, list[str]] = {
            "page": ["-o", f"{name}/page"],
            "text": ["--text"],
            "json": ["--json"],
        }
        found = [measure(folder, form, words) for form, words in forms.items()]
    for each in found:
        took = f"{each.seconds:5.1f} s ({each.cores:.1f} s of cores)"
        print(f"{each.form:5} {took} {each.memory:5.0f} MiB  {each.verdict}")
    if options.json:
        figures: dict[str, Any] = {"bytes": size, "forms": [asdict(each) for each in found]}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
