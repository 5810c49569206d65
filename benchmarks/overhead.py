"""Overhead of Shoal per step, compared with torch loops, interleaved in one run.

    python benchmarks/overhead.py [--model tiny|wide] [--rounds 20] [--json]

Loops: `plain` (DataLoader, forward, backward, clip, AdamW, zero_grad, as tutorials write it), `tuned`
(batches fetched by one index from tensors, fused AdamW), and Shoal (Loader, Step, Run with events)
with each of the two optimizers. A round runs every loop for the same number of steps, in an order
that rotates; ratios are taken within rounds, so that drift cancels.

Then the cost of recording: in one more loop of Shoal, every other turn does not record its steps: its
timeline has no marks and its events keep none. It is one loop, since two identical loops differ by
several hundredths, depending on their memory addresses. Turns are as long as a block of events, so that
each includes one; there are four of each in a round.

First in one process, then in two under DDP through `shoal run`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal
from shoal.telemetry.events import FLUSH_STEPS
from shoal.telemetry.step_timer import Timeline
from shoal.training.run_events import RunEvents
from spread import Spread, quartiles

SAMPLES = 4096
CLASSES = 10
MODELS = {"tiny": (32, 1, 16), "wide": (512, 4, 64)}
"""Name: width, hidden layers, global batch."""

PAIRS = [("shoal", "plain"), ("shoal fused", "tuned")]
TURNS = 4
"""Turns with and without records in a round."""


def build(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = itertools.chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def dataset(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, width, generator=generator)
    return inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)


def wrapped(model: nn.Module, world: shoal.World) -> nn.Module:
    if world.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def plain(world: shoal.World, width: int, layers: int, batch: int) -> Iterator[None]:
    """Train with the loop of the tutorials."""
    model = wrapped(build(width, layers), world)
    optimizer = adamw(model, fused=False)
    data = TensorDataset(*dataset(width))
    sampler: Any = DistributedSampler(data, world.size, world.rank) if world.size > 1 else None
    loader = DataLoader(data, batch // world.size, shuffle=sampler is None, sampler=sampler)
    for epoch in itertools.count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def tuned(world: shoal.World, width: int, layers: int, batch: int) -> Iterator[None]:
    """Train with an expert's optimizations: no DataLoader, one index per tensor, fused AdamW."""
    model = wrapped(build(width, layers), world)
    optimizer = adamw(model, fused=True)
    inputs, labels = dataset(width)
    share = batch // world.size
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(SAMPLES, generator=generator)[world.rank :: world.size]
        for indices in order.split(share):
            loss = F.cross_entropy(model(inputs[indices]), labels[indices])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the same loss as a sum and a count."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Unmarked(Timeline):
    """A timeline that ignores marks."""

    def enter(self, part: int) -> int:
        return part


class Forgetful(RunEvents):
    """Events that keep no step, and do all else that a tick needs."""

    def tick(self, now: float) -> bool:
        recorded, self._recorded = self._recorded, self._numbers()
        return recorded != self._recorded


def always() -> bool:
    return True


def through_shoal(
    world: shoal.World,
    width: int,
    layers: int,
    batch: int,
    *,
    fused: bool,
    records: Callable[[], bool] = always,
) -> Iterator[None]:
    """Train with Loader, Step, and a Run that records those steps for which `records` returns True."""
    marked, unmarked = world.timeline, Unmarked()
    model = shoal.parallelize(build(width, layers), world)
    step = shoal.Step(model, adamw(model, fused=fused), shoal.Task(loss), clip=1.0)
    data = shoal.Loader(dataset(width), world, batch_size=batch)
    with tempfile.TemporaryDirectory() as directory:
        path = world.broadcast(directory)
        with contextlib.redirect_stdout(io.StringIO()):  # no progress between the figures
            made = shoal.Run(path, step, data)
        recording, forgetful = made._recording, Forgetful(made.events, made.steps, data)
        with made as run:
            for each in data.epochs(10**9):
                recorded = records()
                world.timeline = marked if recorded else unmarked
                made._recording = recording if recorded else forgetful
                step(each)
                run.tick()
                world.timeline = marked
                yield


def contenders() -> dict[str, Callable[..., Iterator[None]]]:
    return {
        "plain": plain,
        "shoal": lambda *given: through_shoal(*given, fused=False),
        "tuned": tuned,
        "shoal fused": lambda *given: through_shoal(*given, fused=True),
    }


def measure(world: shoal.World, name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return microseconds per step of each loop, and the paired ratios."""
    loops = {who: make(world, *MODELS[name]) for who, make in contenders().items()}
    for loop in loops.values():
        consume(loop, 50)
    times: dict[str, list[float]] = {who: [] for who in loops}
    names = list(loops)
    for number in range(rounds):
        turn = number % len(names)
        for who in names[turn:] + names[:turn]:
            world.barrier()
            begun = time.perf_counter()
            consume(loops[who], steps)
            times[who].append((time.perf_counter() - begun) / steps * 1e6)
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    figures: dict[str, Any] = {"model": name, "processes": world.size}
    figures["microseconds"] = {who: statistics.median(values) for who, values in times.items()}
    figures["ratios"] = {
        f"{ours} / {theirs}": asdict(ratio(times[ours], times[theirs])) for ours, theirs in PAIRS
    }
    figures["ratios"]["recorded / unrecorded"] = asdict(recorded(world, name, rounds))
    return figures


def recorded(world: shoal.World, name: str, rounds: int) -> Spread:
    """Return the ratio of the times of steps with and without records, turn by turn in one loop."""
    records = True
    loop = through_shoal(world, *MODELS[name], fused=True, records=lambda: records)
    consume(loop, 50)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds * TURNS):
        for records in (True, False) if number % 2 else (False, True):
            world.barrier()
            begun = time.perf_counter()
            consume(loop, FLUSH_STEPS)
            times[records].append(time.perf_counter() - begun)
    loop.close()  # type: ignore[attr-defined]
    return ratio(times[True], times[False])


def consume(loop: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(loop)


def ratio(ours: list[float], theirs: list[float]) -> Spread:
    """Return the median of the paired ratios and their quartiles."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def show(figures: dict[str, Any]) -> None:
    print(f"\n{figures['model']} model, {figures['processes']} process(es): µs per step (median)")
    for who, value in figures["microseconds"].items():
        print(f"  {who:<16} {value:9.1f}")
    for pair, found in figures["ratios"].items():
        print(f"  {pair:<30} {Spread(**found)}")


def run_here(names: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with shoal.init() as world:
        figures = [measure(world, name, rounds, steps) for name in names]
        return list(world.broadcast(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.model or list(MODELS)
    figures = run_here(names, options.rounds, options.steps)
    if options.inside is not None:
        options.inside.write_text(json.dumps(figures))  # every rank the same
        return
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "two.json"
        again = [
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
            "--inside",
            str(result),
            *(f"--model={name}" for name in names),
        ]
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", __file__, "--", *again]
        subprocess.run(command, check=True)
        figures += json.loads(result.read_text())
    for each in figures:
        show(each)
    if options.json:
        print(json.dumps({"overhead": figures}))


if __name__ == "__main__":
    main()
