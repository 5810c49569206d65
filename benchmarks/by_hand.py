"""Shoal compared with a hand-written DDP loop, on the same model, in paired rounds of one run.

    python benchmarks/by_hand.py [--model resnet-small] [-n 2] [--batch 32] [--rounds 20] [--json]

The models are those of `shoal bench scaling`, for example `--model resnet101`; --batch is that of all
processes together, and each has --threads. Between the loop of the tutorials and Shoal are two loops
with one more difference each, and every loop's step is divided into parts, so that the output says
where a difference comes from:

    by hand     DistributedDataParallel as it is, DataLoader with a DistributedSampler
    + views     gradients live in DDP's buckets (gradient_as_bucket_view=True), as Shoal's do
    + gather    and a batch is gathered by one index per tensor, not sample by sample and collated
    shoal       Loader, Step, and a Run that records each step

The interval of a ratio is that of the median, with 95 % confidence. The parts are those of rank 0.
Aim: at most 1.05 times the loop by hand.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from harness import alternate, finish, interval, machine, parse, ratios, show, timed
from loops import gathered, quiet_run, sampled, train, wrapped
from shoal.telemetry.step_timer import OTHER, PARTS
from shoal.tools.bench.scaling.configurations import BuiltIn, parse_subject
from shoal.tools.bench.scaling.models import Workload, make_model

WARM_UP = 6
"""Steps before the first round; in some of them Shoal compares the collectives of the ranks."""
AIM = 1.05
RATIOS = (
    ("shoal", "by hand"),
    ("+ views", "by hand"),
    ("+ gather", "+ views"),
    ("shoal", "+ gather"),
)


def built(made: Workload) -> nn.Module:
    torch.manual_seed(0)
    return made.model if isinstance(made.model, nn.Module) else made.model()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def by_hand(
    world: shoal.World, made: Workload, batch: int, draw: Callable[..., Any], *, views: bool
) -> Iterator[None]:
    """Train on the mean loss of each rank's local batch."""
    model = built(made)
    single = not isinstance(made.dataset, tuple)
    data = (made.dataset,) if single else made.dataset
    inputs: Callable[[Any], Any] = made.task.inputs or (lambda batch: batch[0])

    def objective(model: nn.Module, drawn: Any) -> Tensor:
        value = drawn[0] if single else tuple(drawn)
        total, count = made.task.loss(model(inputs(value)), value)
        return total / count

    replica = wrapped(model, world, views=views)
    batches, enter = draw(world, data, batch), world.timeline.enter
    return train(replica, batches, sgd(model), objective=objective, enter=enter)


def through_shoal(world: shoal.World, made: Workload, batch: int) -> Iterator[None]:
    """Train with Loader, Step, and a Run that records the steps."""
    model = shoal.parallelize(built(made), world)
    step = shoal.Step(model, sgd(model), made.task)
    data = shoal.Loader(made.dataset, world, batch_size=batch)
    with quiet_run(world, step, data) as run:
        for each in data.epochs(10**9):
            step(each)
            run.tick()
            yield


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return ms per step of each loop, and the paired ratios; the slowest rank's time counts."""
    torch.set_num_threads(given.threads)
    subject = parse_subject(given.model)
    assert isinstance(subject, BuiltIn)
    made = make_model(subject, given.batch)
    with shoal.init() as world:
        loops = {
            "by hand": by_hand(world, made, given.batch, sampled, views=False),
            "+ views": by_hand(world, made, given.batch, sampled, views=True),
            "+ gather": by_hand(world, made, given.batch, gathered, views=True),
            "shoal": through_shoal(world, made, given.batch),
        }

        def turn(name: str) -> tuple[float, dict[str, float]]:
            world.timeline.enter(OTHER)
            before = list(world.timeline.spent)
            seconds = timed(world, loops[name].__next__, given.steps)
            world.timeline.enter(OTHER)
            return seconds, spent(before, world.timeline.spent, given.steps)

        for loop in loops.values():
            for _ in range(WARM_UP):
                next(loop)
        found = alternate({name: partial(turn, name) for name in loops}, given.rounds)
        loops["shoal"].close()  # type: ignore[attr-defined]
    times = {name: [seconds for seconds, _ in rounds] for name, rounds in found.items()}
    pairs = {f"{a} / {b}": interval(ratios(times[a], times[b])) for a, b in RATIOS}
    return {
        "model": str(subject),
        **{key: vars(given)[key] for key in ("processes", "batch", "threads", "rounds")},
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "parts": {
            name: {part: statistics.median(each[part] for _, each in rounds) for part in rounds[0][1]}
            for name, rounds in found.items()
        },
        "ratios": pairs,
        "within_aim": pairs["shoal / by hand"].high <= AIM,
    }


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


def main() -> None:
    sizes = {"processes": 2, "batch": 32, "rounds": 20, "steps": 10, "threads": 1}
    given = parse(__doc__, model="resnet-small", **sizes)
    figures = shoal.launch(measure, given, processes=given.processes)[0]
    loops = figures["milliseconds"].items()
    title = f"{figures['model']}, {given.processes} processes, batch {given.batch}, {machine()}"
    show(title, [{"loop": name, "ms": value, **figures["parts"][name]} for name, value in loops])
    show("times", [{"loops": pair, "ratio": found} for pair, found in figures["ratios"].items()])
    print(f"at most {AIM} times the loop by hand: {'yes' if figures['within_aim'] else 'no'}")
    finish(given, {"by_hand": figures})


if __name__ == "__main__":
    main()
