"""Overhead of hang detection, and of the check of collectives in the first steps.

    python benchmarks/watch.py [--rounds 40] [--steps 100] [--json]

A tiny model under DDP on two ranks takes steps with neither, with the watch, and with the watch and the
check that compares each collective between ranks.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch

import shoal
from harness import alternate, finish, machine, parse, show, time_rows, timed
from loops import labelled, stack, through_shoal
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.watchdog.mismatch import CollectiveMatcher
from shoal.distributed.watchdog.watch import Watch

MODES = ("neither", "watch", "watch and check")
WIDTH, BATCH, WARM_UP, SETTLE = 32, 32, 50, 20


def begin(world: shoal.World, mode: str) -> ExitStack:
    """Start what a mode needs; closing the stack ends it."""
    started = ExitStack()
    matching = CollectiveMatcher(world.rank) if mode == "watch and check" else None
    if matching is not None:
        started.callback(matching.stop)
    if mode != "neither" and world.group is not None:
        watch = Watch(
            world.group,
            limits=WaitLimits(step=600.0, prepare=3600.0),
            address="127.0.0.1",
            directory=lambda: None,
            checked=lambda: None if matching is None else matching.current,
        )
        started.callback(watch.stop)
    return started


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step in each mode, round by round."""
    torch.set_num_threads(1)
    with shoal.init(seed=0) as world:
        world.watchdog.leave()  # it would run in all modes
        loop = through_shoal(world, stack(WIDTH, 1), labelled(1024, WIDTH, WIDTH), BATCH)

        def turn(mode: str) -> float:
            with begin(world, mode):
                gc.collect()  # garbage of the start does not belong to a step
                for _ in islice(loop, SETTLE):  # time for a thread to start
                    pass
                return timed(world, loop.__next__, given.steps)

        for _ in islice(loop, WARM_UP):
            pass
        return alternate({mode: partial(turn, mode) for mode in MODES}, given.rounds)


def main() -> None:
    given = parse(__doc__, rounds=40, steps=100)
    rows = time_rows(shoal.launch(measure, given, processes=2)[0], "neither")
    show(f"a step of a tiny model on two ranks, {machine()}", rows)
    finish(given, {"watch": rows})


if __name__ == "__main__":
    main()
