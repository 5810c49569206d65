"""Stages on two processes by torch RPC, compared with one process and with torch's pipelining.

    python benchmarks/remote.py [--rounds 10] [--steps 1] [--json]

A deep stack of wide layers, compute bound, 8 micro-batches to a batch. Each process has one thread: one
process alone with the full model; `shoal.RPCPipeline` and `shoal.Pipeline` with half of the layers on
each of two; and torch's own Schedule1F1B over the same two stages, with the same loss, clipping and
AdamW by hand. While one of them runs, the others wait.

The possible speed-up is measured too: both halves at once, without waiting or communication. It is the
value of two cores of this machine. With two stages and 8 micro-batches each idles for a ninth of the
time, while the pipeline fills and drains, so 8 / 9 of it is the maximum. RPCPipeline's aim is 1.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from harness import alternate, finish, machine, parse, quartiles, ratios, show, timed
from loops import adamw, cross_entropy, labelled, stack, through_shoal
from parallel import piped_by_hand

LAYERS, MICRO_BATCHES, CLASSES = 12, 8, 16
HALF = LAYERS
"""The modules of the first half of the layers, each with its ReLU."""
FULL = MICRO_BATCHES / (MICRO_BATCHES + 1)
ONE, APART = "one process", "halves, nothing sent"


def alone(net: nn.Module, batches: Iterable[Any], *, front: bool = False) -> Iterator[None]:
    """Train by hand in one process; the front half has no loss, and the mean of its output instead."""
    optimizer = adamw(net.parameters())
    for batch in batches:
        for inputs, labels in zip(*(column.chunk(MICRO_BATCHES) for column in batch), strict=True):
            output = net(inputs.requires_grad_())
            mean: Tensor = output.mean() if front else cross_entropy(output, labels)
            (mean / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop in each round."""
    names = [str(number) for number in range(2 * LAYERS + 1)]
    strategies = {
        "shoal.RPCPipeline": shoal.RPCPipeline(stages={"front": names[:HALF], "back": names[HALF:]}),
        "shoal.Pipeline, 1f1b": shoal.Pipeline(split_points=(names[HALF],)),
    }
    with shoal.init(layout="pipeline=2") as world:
        torch.set_num_threads(1)
        rows = MICRO_BATCHES * given.rows
        data = labelled(4 * rows, given.width, CLASSES)
        batches = partial(cycle, [*zip(*(column.split(rows) for column in data), strict=True)])

        def net() -> nn.Sequential:
            return stack(given.width, LAYERS, nn.Linear(given.width, CLASSES))

        def half() -> nn.Module:
            return net()[HALF:] if world.rank else net()[:HALF]

        loops: dict[str, Iterator[Any]] = {
            ONE: alone(net(), batches()),
            "torch Schedule1F1B": piped_by_hand(world, half(), batches(), MICRO_BATCHES),
            APART: alone(half(), batches(), front=world.is_rank_zero),
        }
        for name, strategy in strategies.items():
            options: dict[str, Any] = {
                "strategy": strategy,
                "micro_batches": MICRO_BATCHES,
                "clip": 1.0,
            }
            loops[name] = through_shoal(world, net(), data, rows, **options)

        def turn(name: str) -> float:
            here = name != ONE or world.is_rank_zero
            return timed(world, loops[name].__next__ if here else int, given.steps)

        # The first rounds begin the loops and check the collectives.
        return alternate({name: partial(turn, name) for name in loops}, given.rounds, uncounted=2)


def main() -> None:
    given = parse(__doc__, width=768, rows=512, rounds=10, steps=1)
    times = shoal.launch(measure, given, processes=2)[0]
    rows = [
        {
            "way": name,
            "ms per step": quartiles([1e3 * each for each in own]),
            "speed-up": quartiles(ratios(times[ONE], own)),
        }
        for name, own in times.items()
    ]
    what = f"{LAYERS} layers of {given.width}, {MICRO_BATCHES} micro-batches of {given.rows} rows"
    show(f"{what}, one thread in each process, {machine()}", rows)
    most = FULL * quartiles(ratios(times[ONE], times[APART])).median
    print(f"the maximum with {MICRO_BATCHES} micro-batches: {most:.3f} x")
    finish(given, {"remote": rows})


if __name__ == "__main__":
    main()
