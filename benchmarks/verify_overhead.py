"""Time of a step of a transformer with and without the observation of `shoal verify`.

    python benchmarks/verify_overhead.py
    python benchmarks/verify_overhead.py --width 512 --layers 8 --rounds 20

Hooks stay for the rest of a process, so each measurement is a process with one thread that trains
without distribution. "hooks" records each step, as all runs of `shoal verify` do. "operations" also
records each operation, as the second pass does for one step. Rounds alternate the processes. Ratios are
relative to "plain", within rounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

from shoal.tools.verify.hooks import install_hooks
from shoal.tools.verify.observations import ObserverOptions
from spread import quartiles

WAYS = ("plain", "hooks", "operations")
WARM_UP = 2


def seconds_per_step(given: argparse.Namespace, way: str, folder: str) -> float:
    """Train in this process and return the time of a step."""
    torch.set_num_threads(1)
    if way != "plain":
        trace = 1 if way == "operations" else None
        install_hooks(
            ObserverOptions(folder=folder, root=folder, stop_after=10**9, trace_at=trace), rank=0
        )
    layer = nn.TransformerEncoderLayer(given.width, 4, 4 * given.width, batch_first=True)
    model = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(given.batch, given.context, given.width)
    begun = 0.0
    for number in range(WARM_UP + given.steps):
        if number == WARM_UP:
            begun = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - begun
    return seconds / int(given.steps)


def main() -> None:
    """Print the times of a step, and the ratios to "plain"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    shape = {"layers": 4, "width": 128, "context": 64, "batch": 16}
    for name, value in (shape | {"rounds": 10, "steps": 10}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=WAYS, help="measure one way and print its seconds")
    given = parser.parse_args()
    if given.only:
        with tempfile.TemporaryDirectory() as folder:
            print(seconds_per_step(given, given.only, folder))
        return
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        for way in sorted(WAYS, reverse=number % 2 == 1):
            command = [sys.executable, *sys.argv, "--only", way]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times[way].append(float(output))
    for way, found in times.items():
        ratios = [ours / plain for ours, plain in zip(found, times["plain"], strict=True)]
        print(
            f"{way:10s} {quartiles([1e3 * value for value in found])} ms, {quartiles(ratios)} of plain"
        )


if __name__ == "__main__":
    main()
