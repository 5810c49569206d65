"""Overhead of Shoal per step, compared with torch loops, interleaved in one run.

    python benchmarks/overhead.py [--models tiny wide] [--rounds 20] [--steps 200] [--json]

Loops: `plain` (DataLoader, forward, backward, clip, AdamW, zero_grad, as tutorials write it), `tuned`
(batches fetched by one index from tensors, fused AdamW), and Shoal (Loader, Step, Run with events) with
each of the two optimizers. A round runs every loop for the same number of steps.

Then the cost of recording: in one more loop of Shoal, every other turn does not record its steps: its
timeline has no marks and its events keep none. It is one loop, since two identical loops differ by
several hundredths, depending on their memory addresses. Turns are as long as a block of events, so that
each includes one; there are four of each in a round.

First in one process, then in two under DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import shoal
from harness import (
    Spread,
    alternate,
    finish,
    machine,
    parse,
    quartiles,
    ratios,
    show,
    time_steps,
    timed,
)
from loops import Data, gathered, labelled, loss, quiet_run, sampled, stack, train, wrapped
from shoal.telemetry.events import FLUSH_STEPS
from shoal.telemetry.step_timer import Timeline
from shoal.training.run_events import RunEvents

SAMPLES, CLASSES, WARM_UP = 4096, 10, 50
MODELS = {"tiny": (32, 1, 16), "wide": (512, 4, 64)}
"""Name: width, hidden layers, global batch."""
PAIRS = [("shoal", "plain"), ("shoal fused", "tuned")]
TURNS = 4
"""Turns with and without records in a round."""


def build(name: str) -> tuple[nn.Sequential, Data, int]:
    width, layers, batch = MODELS[name]
    return stack(width, layers, nn.Linear(width, CLASSES)), labelled(SAMPLES, width, CLASSES), batch


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)


def in_torch(world: shoal.World, name: str, *, tuned: bool) -> Iterator[None]:
    """Train with the loop of the tutorials, or with an expert's optimizations."""
    model, data, batch = build(name)
    batches = (gathered if tuned else sampled)(world, data, batch)
    return train(wrapped(model, world), batches, adamw(model, fused=tuned), clip=1.0)


class Unmarked(Timeline):
    """A timeline that ignores marks."""

    def enter(self, part: int) -> int:
        return part


class Forgetful(RunEvents):
    """Events that keep no step, and do all else that a tick needs."""

    def tick(self, now: float) -> bool:
        recorded, self._recorded = self._recorded, self._numbers()
        return recorded != self._recorded


def through_shoal(
    world: shoal.World, name: str, *, fused: bool, records: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Train with Loader, Step, and a Run that records those steps for which `records` returns True."""
    marked, unmarked = world.timeline, Unmarked()
    model, columns, batch = build(name)
    shoal.parallelize(model, world)
    step = shoal.Step(model, adamw(model, fused=fused), shoal.Task(loss), clip=1.0)
    data = shoal.Loader(columns, world, batch_size=batch)
    with quiet_run(world, step, data) as run:
        recording, forgetful = run._recording, Forgetful(run.events, run.steps, data)
        for each in data.epochs(10**9):
            recorded = records()
            world.timeline = marked if recorded else unmarked
            run._recording = recording if recorded else forgetful
            step(each)
            run.tick()
            world.timeline = marked
            yield


def measure(world: shoal.World, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds per step of each loop, and the paired ratios."""
    loops = {
        "plain": in_torch(world, name, tuned=False),
        "shoal": through_shoal(world, name, fused=False),
        "tuned": in_torch(world, name, tuned=True),
        "shoal fused": through_shoal(world, name, fused=True),
    }
    times = time_steps(
        world,
        {who: loop.__next__ for who, loop in loops.items()},
        rounds=given.rounds,
        steps=given.steps,
        warm_up=WARM_UP,
    )
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    found = {f"{ours} / {theirs}": ratios(times[ours], times[theirs]) for ours, theirs in PAIRS}
    return {
        "model": name,
        "processes": world.size,
        "microseconds": {who: 1e6 * statistics.median(values) for who, values in times.items()},
        "ratios": {pair: quartiles(values) for pair, values in found.items()}
        | {"recorded / unrecorded": recorded(world, name, given.rounds)},
    }


def recorded(world: shoal.World, name: str, rounds: int) -> Spread:
    """Return the ratio of the times of steps with and without records, turn by turn in one loop."""
    records = True
    loop = through_shoal(world, name, fused=True, records=lambda: records)

    def turn(recording: bool) -> float:
        nonlocal records
        records = recording
        return timed(world, loop.__next__, FLUSH_STEPS)

    for _ in itertools.islice(loop, WARM_UP):
        pass
    turns = {"with": partial(turn, True), "without": partial(turn, False)}
    times = alternate(turns, rounds * TURNS)
    with contextlib.closing(loop):  # type: ignore[type-var]
        return quartiles(ratios(times["with"], times["without"]))


def on_rank(given: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with shoal.init() as world:
        return [measure(world, name, given) for name in given.models]


def main() -> None:
    given = parse(__doc__, models=MODELS, rounds=20, steps=200)
    figures = [each for size in (1, 2) for each in shoal.launch(on_rank, given, processes=size)[0]]
    for each in figures:
        title = f"{each['model']} model, {each['processes']} process(es), {machine()}"
        show(title, [{"loop": who, "µs per step": mean} for who, mean in each["microseconds"].items()])
        show("times", [{"loops": pair, "ratio": found} for pair, found in each["ratios"].items()])
    finish(given, {"overhead": figures})


if __name__ == "__main__":
    main()
