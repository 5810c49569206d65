"""Shoal compared with a hand-written DDP loop, on the same model, in paired rounds of one run.

    python benchmarks/by_hand.py [--model resnet-small] [-n 2] [--batch 32] [--rounds 20] [--json]

The models are those of `shoal bench scaling`, for example `--model resnet101`.
All loops run in the same processes, with the same number of threads, and take the same number of steps
in each round, in an order that rotates. Between the loop of the tutorials and Shoal are two loops with
one more difference each, and every loop's step is divided into parts, so that the output says where a
difference comes from:

    by hand     DistributedDataParallel as it is, DataLoader with a DistributedSampler
    + views     gradients live in DDP's buckets (gradient_as_bucket_view=True), as Shoal's do
    + gather    and a batch is gathered by one index per tensor, not sample by sample and collated
    shoal       Loader, Step, and a Run that records each step

A ratio is that of the times of one round; the interval is that of the median, with 95 % confidence.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal
from shoal.telemetry.step_timer import BACKWARD, FORWARD, OTHER, PARTS, UPDATE, WAIT, Timeline
from shoal.tools.bench.scaling.models import Workload, make_model
from shoal.tools.bench.scaling.subject import BuiltIn, parse_subject
from spread import Spread, interval

WARM_UP = 6
"""Steps before the first round; in some of them Shoal compares the collectives of the ranks."""
AIM = 1.05
"""The aim: at most this ratio of Shoal's time to that of the loop by hand."""
RATIOS = (
    ("shoal", "by hand"),
    ("+ views", "by hand"),
    ("+ gather", "+ views"),
    ("shoal", "+ gather"),
)

Loop = Iterator[None]


def built(made: Workload) -> nn.Module:
    torch.manual_seed(0)
    return made.model if isinstance(made.model, nn.Module) else made.model()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def tensors(made: Workload) -> list[Tensor]:
    return list(made.dataset) if isinstance(made.dataset, tuple) else [made.dataset]


def wrapped(model: nn.Module, world: shoal.World, *, views: bool) -> nn.Module:
    if world.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)


def train(
    made: Workload,
    model: nn.Module,
    batches: Callable[[int], Iterator[list[Tensor]]],
    timeline: Timeline,
) -> Loop:
    """Take a step per iteration, over consecutive epochs, on the mean loss of each rank's local batch.

    The parts of a step are marked on `timeline`, as Shoal marks its own.
    """
    optimizer = optimizer_of(model)
    inputs: Callable[[Any], Any] = made.task.inputs or (lambda batch: batch[0])
    single = not isinstance(made.dataset, tuple)
    for epoch in itertools.count():
        drawn = batches(epoch)
        while True:
            timeline.enter(WAIT)
            batch = next(drawn, None)
            if batch is None:
                break
            timeline.enter(FORWARD)
            value = batch[0] if single else tuple(batch)
            total, count = made.task.loss(model(inputs(value)), value)
            timeline.enter(BACKWARD)
            (total / count).backward()
            timeline.enter(UPDATE)
            optimizer.step()
            optimizer.zero_grad()
            yield


def by_hand(world: shoal.World, made: Workload, batch: int, *, views: bool) -> Loop:
    """Train with the loop of the tutorials."""
    data: Dataset[Any] = TensorDataset(*tensors(made))
    sampler: Any = DistributedSampler(data, world.size, world.rank)
    loader = DataLoader(data, batch // world.size, sampler=sampler)

    def batches(epoch: int) -> Iterator[list[Tensor]]:
        sampler.set_epoch(epoch)
        return iter(loader)

    return train(made, wrapped(built(made), world, views=views), batches, world.timeline)


def gathered(world: shoal.World, made: Workload, batch: int) -> Loop:
    """Train with the same loop, with batches by one index per tensor."""
    columns = tensors(made)

    def batches(epoch: int) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(columns[0]), generator=generator)[world.rank :: world.size]
        for indices in order.split(batch // world.size):
            yield [column[indices] for column in columns]

    return train(made, wrapped(built(made), world, views=True), batches, world.timeline)


def through_shoal(world: shoal.World, made: Workload, batch: int) -> Loop:
    """Train with Loader, Step, and a Run that records the steps."""
    model = shoal.parallelize(built(made), world)
    step = shoal.Step(model, optimizer_of(model), made.task)
    data = shoal.Loader(made.dataset, world, batch_size=batch)
    with tempfile.TemporaryDirectory() as directory:
        path = world.broadcast(directory)
        with contextlib.redirect_stdout(io.StringIO()), shoal.Run(path, step, data) as run:
            for each in data.epochs(10**9):
                step(each)
                run.tick()
                yield


def measure(world: shoal.World, model: str, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return ms per step of each loop, and the paired ratios; the slowest rank's time counts."""
    subject = parse_subject(model)
    assert isinstance(subject, BuiltIn)
    made = make_model(subject, batch)
    loops: dict[str, Loop] = {
        "by hand": by_hand(world, made, batch, views=False),
        "+ views": by_hand(world, made, batch, views=True),
        "+ gather": gathered(world, made, batch),
        "shoal": through_shoal(world, made, batch),
    }
    for loop in loops.values():
        consume(loop, WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in loops}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            world.barrier()
            world.timeline.enter(OTHER)
            before, begun = list(world.timeline.spent), time.perf_counter()
            consume(loops[name], steps)
            world.timeline.enter(OTHER)
            parts[name].append(spent(before, world.timeline.spent, steps))
            slowest = max(world.gather(time.perf_counter() - begun))
            times[name].append(slowest / steps * 1e3)
    loops["shoal"].close()  # type: ignore[attr-defined]
    ratios = {
        f"{ours} / {theirs}": asdict(paired(times[ours], times[theirs])) for ours, theirs in RATIOS
    }
    return {
        "model": str(subject),
        "processes": world.size,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "parts": {
            name: {part: statistics.median(each[part] for each in found) for part in found[0]}
            for name, found in parts.items()
        },
        "ratios": ratios,
        "within_aim": ratios["shoal / by hand"]["high"] <= AIM,
    }


def consume(loop: Loop, steps: int) -> None:
    for _ in range(steps):
        next(loop)


def spent(before: Sequence[int], now: Sequence[int], steps: int) -> dict[str, float]:
    """Return ms per step by part; a hand-written loop communicates within backward."""
    own = {part: (b - a) / steps / 1e6 for part, a, b in zip(PARTS, before[1:], now[1:], strict=True)}
    return {
        "data": own["wait"],
        "forward": own["forward"],
        "backward and communication": own["backward"] + own["communication"],
        "optimizer and records": own["update"],
        "rest": own["other"] + own["transfer"] + own["checkpoint"] + own["evaluation"],
    }


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the median of the ratios within rounds, and its interval."""
    return interval([a / b for a, b in zip(ours, theirs, strict=True)])


def show(figures: dict[str, Any]) -> None:
    print(
        f"\n{figures['model']}, {figures['processes']} processes, batch {figures['batch']}: "
        "ms per step (median)"
    )
    for name, value in figures["milliseconds"].items():
        own = ", ".join(f"{part} {each:.2f}" for part, each in figures["parts"][name].items())
        print(f"  {name:<10} {value:9.2f}  rank 0: {own}")
    for pair, found in figures["ratios"].items():
        print(f"  {pair:<20} {Spread(**found)}")
    print(f"  at most {AIM} times the loop by hand: {'yes' if figures['within_aim'] else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet-small", help="as for `shoal bench scaling`")
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="of all processes together")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a loop in a round")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        torch.set_num_threads(options.threads)
        with shoal.init() as world:
            figures = measure(world, options.model, options.batch, options.rounds, options.steps)
            if world.is_rank_zero:
                options.inside.write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "figures.json"
        shares = ("model", "batch", "rounds", "steps", "threads")
        again = [f"--{name}={getattr(options, name)}" for name in shares]
        run = [sys.executable, "-m", "shoal", "run", "-n", str(options.processes), __file__, "--"]
        subprocess.run([*run, *again, f"--inside={result}"], check=True)
        figures = json.loads(result.read_text())
    show(figures)
    if options.json:
        print(json.dumps({"by_hand": figures}))


if __name__ == "__main__":
    main()
