"""Overhead of Shoal per step, compared with loops in plain PyTorch, interleaved in one run.

    python benchmarks/overhead.py [--models tiny wide] [-n 1 2] [--rounds 20] [--steps 200] [--json]
    python benchmarks/overhead.py --models resnet-small gpt -n 2 --batch 32 --steps 10

`tiny` and `wide` are stacks of linear layers, other names the models of `shoal bench scaling`. Loops:
`plain` (DataLoader, forward, backward, clip, AdamW, zero_grad, as tutorials write it), `tuned` (batches
fetched by one index from tensors, fused AdamW), `around` (only a Loader and a Run around the loop and
the DDP of `plain`), and Shoal (Loader, Step, Run with events) with each of the two optimizers. The
interval of a ratio is that of the median, with 95 % confidence.

Then, with the stacks, the cost of records: in one more loop of Shoal, every other turn does not record
its steps: its timeline has no marks and its events keep none. It is one loop, since two identical loops
differ by several hundredths, depending on their memory addresses. Turns are as long as a block of
events, so that each includes one; there are four of each in a round.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import harness
import shoal
from loops import gathered, labelled, loss, quiet_run, sampled, stack, train, wrapped
from shoal.telemetry.events import FLUSH_STEPS
from shoal.telemetry.step_timer import Timeline
from shoal.tools.bench.scaling.configurations import BuiltIn, parse_subject
from shoal.tools.bench.scaling.models import Workload, make_model
from shoal.training.run_events import RunEvents

SAMPLES, CLASSES, WARM_UP = 4096, 10, 10
MODELS = {"tiny": (32, 1, 16), "wide": (512, 4, 64)}
"""Name: width, hidden layers, global batch."""
TURNS = 4
"""Turns with and without records in a round."""


def build(name: str, batch: int | None) -> tuple[Workload, nn.Module, int]:
    """Return the task and the data of a model, the model, and the global batch."""
    if name in MODELS:
        width, layers, rows = MODELS[name]
        model = stack(width, layers, nn.Linear(width, CLASSES))
        data = labelled(SAMPLES, width, CLASSES)
        return Workload(model, shoal.Task(loss), data), model, batch or rows
    subject = parse_subject(name)
    assert isinstance(subject, BuiltIn)
    made = make_model(subject, batch or 32)
    torch.manual_seed(0)
    return made, made.model if isinstance(made.model, nn.Module) else made.model(), batch or 32


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)


def in_torch(world: shoal.World, name: str, batch: int | None, *, tuned: bool) -> Iterator[None]:
    """Train with the loop of the tutorials, or with an expert's optimizations."""
    made, model, batch = build(name, batch)
    single = isinstance(made.dataset, Tensor)
    inputs: Callable[[Any], Any] = made.task.inputs or (lambda drawn: drawn[0])

    def mean_loss(model: nn.Module, drawn: Any) -> Tensor:
        value = drawn[0] if single else tuple(drawn)
        total, count = made.task.loss(model(inputs(value)), value)
        return total / count

    data = (made.dataset,) if single else made.dataset
    batches = (gathered if tuned else sampled)(world, data, batch)
    optimizer = adamw(model, fused=tuned)
    return train(wrapped(model, world), batches, optimizer, objective=mean_loss, clip=1.0)


def around_ddp(world: shoal.World, name: str, batch: int | None) -> Iterator[None]:
    """Train with DDP in a plain loop, with only a Loader and a Run of Shoal."""
    made, model, batch = build(name, batch)
    inputs: Callable[[Any], Any] = made.task.inputs or (lambda drawn: drawn[0])
    model = wrapped(model, world)
    optimizer = adamw(model, fused=False)
    data = shoal.Loader(made.dataset, world, batch_size=batch)
    with quiet_run(world, model, data, optimizer=optimizer) as run:
        for each in data.epochs(10**9):
            for drawn in each:
                total, _ = made.task.loss(model(inputs(drawn)), drawn)
                each.averaged(total).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.tick()
            yield


class Unmarked(Timeline):
    """A timeline that ignores marks."""

    def enter(self, part: int) -> int:
        return part


class Forgetful(RunEvents):
    """Events that keep no step, and do all else that a tick needs."""

    def tick(self, now: float) -> bool:
        recorded, self._recorded = self._recorded, self.numbers()
        return recorded != self._recorded


def through_shoal(
    world: shoal.World,
    name: str,
    batch: int | None,
    *,
    fused: bool,
    records: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Train with Loader, Step, and a Run that records those steps for which `records` returns True."""
    marked, unmarked = world.timeline, Unmarked()
    made, model, batch = build(name, batch)
    shoal.parallelize(model, world)
    step = shoal.Step(model, adamw(model, fused=fused), made.task, clip=1.0)
    data = shoal.Loader(made.dataset, world, batch_size=batch)
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


def measure(given: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return the rows of a model's loops on this rank."""
    torch.set_num_threads(1)
    with shoal.init() as world:
        loops = {
            "plain": in_torch(world, name, given.batch, tuned=False),
            "around": around_ddp(world, name, given.batch),
            "shoal": through_shoal(world, name, given.batch, fused=False),
            "tuned": in_torch(world, name, given.batch, tuned=True),
            "shoal fused": through_shoal(world, name, given.batch, fused=True),
        }
        steps = {who: loop.__next__ for who, loop in loops.items()}
        times = harness.time_steps(
            world, steps, rounds=given.rounds, steps=given.steps, warm_up=WARM_UP
        )
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]
        rows = harness.time_rows(times, "plain", "tuned", summary=harness.interval)
        if name in MODELS:
            ratio = harness.interval(recorded(world, name, given))
            rows.append({"loop": "recorded / unrecorded", "ratio": ratio})
        return rows


def recorded(world: shoal.World, name: str, given: argparse.Namespace) -> list[float]:
    """Return the ratios of the times of steps with and without records, turn by turn in one loop."""
    records = True
    loop = through_shoal(world, name, given.batch, fused=True, records=lambda: records)

    def turn(recording: bool) -> float:
        nonlocal records
        records = recording
        return harness.timed(world, loop.__next__, FLUSH_STEPS)

    for _ in itertools.islice(loop, WARM_UP):
        pass
    turns = {"with": partial(turn, True), "without": partial(turn, False)}
    times = harness.alternate(turns, given.rounds * TURNS)
    loop.close()  # type: ignore[attr-defined]
    return harness.ratios(times["with"], times["without"])


def main() -> None:
    given = harness.parse(__doc__, models=[*MODELS], processes=[1, 2], batch=int, rounds=20, steps=200)
    figures: dict[str, Any] = {}
    for size, name in itertools.product(given.processes, given.models):
        rows = shoal.launch(measure, given, name, processes=size)[0]
        harness.show(f"{name} model, {size} process(es), {harness.machine()}", rows)
        figures[f"{name} {size}"] = rows
    harness.finish(given, {"overhead": figures})


if __name__ == "__main__":
    main()
