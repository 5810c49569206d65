"""Time of a step of a transformer with and without the observation of `shoal verify`.

    python benchmarks/verify_overhead.py
    python benchmarks/verify_overhead.py --width 512 --layers 8 --rounds 20

Hooks stay for the rest of a process, so each measurement is a process with one thread that trains
without distribution. "hooks" records each step, as all runs of `shoal verify` do. "operations" also
records each operation, as the second pass does for one step. Ratios are relative to "plain".
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch

import shoal
from harness import alternate, finish, machine, parse, show, time_rows, time_steps
from loops import Transformer, adamw, sampled, sequences, train
from shoal.tools.verify.hooks import install_hooks
from shoal.tools.verify.observations import ObserverOptions

WAYS = ("plain", "hooks", "operations")
WORDS, WARM_UP = 128, 2


def measure(given: argparse.Namespace, way: str) -> float:
    """Train in this process and return the seconds of a step."""
    torch.set_num_threads(1)
    with shoal.init() as world, tempfile.TemporaryDirectory() as folder:
        if way != "plain":
            trace = 1 if way == "operations" else None
            install_hooks(
                ObserverOptions(folder=folder, root=folder, stop_after=10**9, trace_at=trace), rank=0
            )
        model = Transformer(WORDS, given.width, given.layers)
        data = sequences(8 * given.batch, given.context, WORDS)
        loop = train(model, sampled(world, data, given.batch), adamw(model.parameters()))
        times = time_steps(world, {way: loop.__next__}, rounds=1, steps=given.steps, warm_up=WARM_UP)
    return times[way][0]


def main() -> None:
    given = parse(__doc__, layers=4, width=128, context=64, batch=16, rounds=10, steps=10)
    found = alternate(
        {way: partial(shoal.launch, measure, given, way, processes=1) for way in WAYS}, given.rounds
    )
    rows = time_rows({way: [each for (each,) in rounds] for way, rounds in found.items()}, "plain")
    show(f"{given.layers} layers of {given.width}, {machine()}", rows)
    finish(given, {"verify_overhead": rows})


if __name__ == "__main__":
    main()
