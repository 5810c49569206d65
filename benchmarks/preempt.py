"""Cost of checking for a signal in a step, and the time until ranks agree on the tick to stop in.

    python benchmarks/preempt.py [--ranks 1 2 4] [--rounds 20] [--json]

On each number of ranks: nanoseconds of one call of `due`, as `Run.tick` makes it without a signal, and
milliseconds from a signal to one rank until every rank knows the last tick. Then the step of a small
training loop with and without it, as the ratio within rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show, spread, timed
from loops import adamw, labelled, sampled, stack, train
from shoal.training.preemption import PreemptionHandler

CALLS, STEPS, WIDTH = 200_000, 200, 32


@contextlib.contextmanager
def handler(world: shoal.World) -> Iterator[PreemptionHandler]:
    """Start a handler on all ranks."""
    former = signal.getsignal(signal.SIGUSR1)
    stopping = PreemptionHandler(world)
    stopping.start()
    world.barrier()
    yield stopping
    stopping.stop()
    signal.signal(signal.SIGUSR1, former)  # a handler that has stopped its run leaves its own


def agreement(world: shoal.World) -> float:
    """Return the milliseconds from a signal to the last rank until all ranks know, by one clock."""
    with handler(world) as stopping:
        sent = time.monotonic()
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        while stopping.due() is None:
            time.sleep(1e-4)  # a step
        known = max(world.gather(time.monotonic()))
    return float(known - world.broadcast(sent, source=world.size - 1)) * 1e3


def cost(world: shoal.World) -> float:
    """Return the nanoseconds of one call of `due`."""
    with handler(world) as stopping:
        return 1e9 * timed(world, stopping.due, CALLS)


def steps(world: shoal.World, loop: Iterator[None], *, checked: bool) -> float:
    """Return the seconds of a step, which `due` follows if it is checked."""
    if not checked:
        return timed(world, loop.__next__, STEPS)
    with handler(world) as stopping:
        return timed(world, lambda: (next(loop), stopping.due()), STEPS)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure on this rank."""
    torch.set_num_threads(1)
    with shoal.init() as world:
        model = stack(WIDTH, 2)  # of each rank by itself
        loop = train(model, sampled(world, labelled(1024, WIDTH, WIDTH), 16), adamw(model.parameters()))
        agreed = [agreement(world) for _ in range(given.rounds)]
        turns = {
            name: partial(steps, world, loop, checked=name == "with") for name in ("with", "without")
        }
        times = alternate(turns, given.rounds, uncounted=1)
        return {
            "ranks": world.size,
            "due, ns": quartiles([cost(world) for _ in range(5)]),
            "agreed, ms": spread(agreed),
            "step with / without": quartiles(ratios(times["with"], times["without"])),
        }


def main() -> None:
    given = parse(__doc__, ranks=[1, 2, 4], rounds=20)
    rows = [shoal.launch(measure, given, processes=size)[0] for size in given.ranks]
    show(f"preemption, {machine()}", rows)
    finish(given, {"preempt": rows})


if __name__ == "__main__":
    main()
