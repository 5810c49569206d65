"""The cost of one option of Shoal per step, in paired rounds of one run.

    python benchmarks/option_cost.py --what batch-norm -n 2 --rounds 10
    python benchmarks/option_cost.py --what random [--compile inductor] [--ways torch samples]
    python benchmarks/option_cost.py --what bits -n 4 [--model gpt]
    python benchmarks/option_cost.py --what verify, hangs or preemption

batch-norm: a ResNet. "torch" is a plain loop, with DDP on several ranks. "rank" is Shoal with
`statistics="rank"`, as in DDP, and with it the cost of Shoal without exchange. "groups" has one group
for each rank, and "two groups" has two in the batch. "sync", only for several GPUs, is DDP with torch's
SyncBatchNorm.

random: a GPT with dropout 0.1. "ranks" is Shoal with `random="ranks"`; the difference to "samples" is
the cost of the keys. "none" is "ranks" with dropout 0.

bits: linear layers, or a GPT. "rounding" has as many micro-batches as `exact="bits"`, and "bits" twice
as many virtual ranks as ranks. Both are deterministic. Aim: at most 1.15 times "rounding".

verify: "hooks" records each step, as all runs of `shoal verify` do, and "operations" also each
operation, as the second pass does for one step.

hangs: the detection of hangs ("watch"), and with it the check in the first steps that compares each
collective between ranks. preemption: the check for a signal in each tick, and the time until ranks
agree on the tick to stop in.

Each way has its own ranks with one thread each, which wait while those of another one run. Sizes that
are not given are those of the subject. Memory is the peak of the process of rank 0, on GPUs that of
the allocator.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import shoal
from helpers.ranks import Ranks
from loops import Transformer, by_hand, gathered, labelled, sequences, stack, through_shoal
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.watchdog.mismatch import CollectiveMatcher
from shoal.distributed.watchdog.watch import Watch
from shoal.tools.verify.hooks import install_hooks
from shoal.tools.verify.observations import ObserverOptions
from shoal.training.preemption import PreemptionHandler

from gpt import GPT  # isort: skip

WORDS, SAMPLES, PER_RANK = 256, 2048, 2
"""PER_RANK: virtual ranks of each rank, and micro-batches of "rounding"."""
RUNNING: dict[str, Iterator[Any]] = {}
"""The loop of this rank."""

Loop = Callable[[shoal.World, argparse.Namespace, str], Iterator[Any]]


class Block(nn.Module):
    """A basic block of ResNet-18 (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Sequential()
        if stride > 1 or inputs != width:
            skip = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.skip(x))


def resnet18(width: int) -> nn.Module:
    """Return a ResNet-18 for small images."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = []
    for number, (before, after) in enumerate(pairwise(widths)):
        blocks += [Block(before, after, 2 if number else 1), Block(after, after, 1)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def normalize(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    torch.manual_seed(0)
    model = resnet18(given.width)
    images = torch.randn(2 * given.batch, 3, given.context, given.context)
    data = images, torch.randint(0, 10, (2 * given.batch,))
    groups = {"groups": max(1, given.batch // world.size), "two groups": given.batch // 2}
    train: Any = partial(through_shoal, statistics=groups.get(way, way))
    if way in ("torch", "sync"):
        train = partial(by_hand, draw=gathered)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if way == "sync" else model
    return train(world, model, data, given.batch, optimizer=sgd, compiled=given.compile or None)  # type: ignore[no-any-return]


def draw(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    torch.manual_seed(0)
    shape = argparse.Namespace(**vars(given), words=WORDS, heads=4)
    model = GPT(shape, dropout=0.0 if way == "none" else 0.1)
    train: Any = partial(through_shoal, random="samples" if way == "samples" else "ranks")
    if way == "torch":
        train = partial(by_hand, draw=gathered)
    data = sequences(8 * given.batch, given.context, WORDS)
    return train(world, model, data, given.batch, compiled=given.compile or None)  # type: ignore[no-any-return]


def linear_or_gpt(given: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if given.model == "gpt":
        model = Transformer(WORDS, given.width, given.layers, given.context)
        return model, sequences(SAMPLES, given.context, WORDS)
    return stack(given.width, given.layers), labelled(SAMPLES, given.width, given.width)


def sum_up(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    model, data = linear_or_gpt(given)
    if way == "plain":
        return by_hand(world, model, data, given.batch)
    parts = PER_RANK if way == "rounding" else 1
    return through_shoal(world, model, data, given.batch, micro_batches=parts)


def observe(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    if way != "plain":
        folder = tempfile.mkdtemp()
        trace = 1 if way == "operations" else None
        options = ObserverOptions(folder=folder, root=folder, stop_after=10**9, trace_at=trace)
        install_hooks(options, rank=0)
    model = Transformer(WORDS, given.width, given.layers)
    return by_hand(world, model, sequences(8 * given.batch, given.context, WORDS), given.batch)


def detect(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    world.watchdog.leave()  # it would run in all ways
    matching = CollectiveMatcher(world.rank) if way == "watch and check" else None
    if way != "neither" and world.group is not None:
        Watch(
            world.group,
            limits=WaitLimits(step=600.0, prepare=3600.0),
            address="127.0.0.1",
            directory=lambda: None,
            checked=lambda: None if matching is None else matching.current,
        )
    return through_shoal(world, *linear_or_gpt(given), given.batch)


def stop(world: shoal.World, given: argparse.Namespace, way: str) -> Iterator[Any]:
    loop = by_hand(world, *linear_or_gpt(given), given.batch)
    if way == "plain":
        return loop
    stopping = PreemptionHandler(world)
    stopping.start()
    return ((each, stopping.due()) for each in loop)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Ways with their options of `shoal.init`, the loop of a way, sizes, and bases of ratios."""

    ways: Mapping[str, Mapping[str, Any]]
    loop: Loop
    sizes: tuple[int, ...]
    """Width, layers, context (of images: pixels), batch, rounds, steps."""
    bases: tuple[str, ...]
    warm_up: int = 6
    summary: Callable[..., harness.Spread] = field(default=harness.quartiles)


def same(*ways: str, **options: Any) -> dict[str, Mapping[str, Any]]:
    return dict.fromkeys(ways, options)


BITS = same("plain", "rounding", deterministic=True) | same("bits", deterministic=True, exact="bits")
SUBJECTS = {
    "batch-norm": Subject(
        ways=same("torch", "rank", "batch", "groups", "two groups", "sync"),
        loop=normalize,
        sizes=(16, 1, 32, 64, 7, 5),
        bases=("torch",),
    ),
    "random": Subject(
        ways=same("torch", "none", "ranks", "samples"),
        loop=draw,
        sizes=(128, 4, 64, 16, 10, 5),
        bases=("torch",),
    ),
    "bits": Subject(
        ways=BITS,
        loop=sum_up,
        sizes=(512, 6, 32, 64, 40, 10),
        bases=("plain", "rounding"),
        summary=harness.interval,
    ),
    "verify": Subject(
        ways=same("plain", "hooks", "operations"),
        loop=observe,
        sizes=(128, 4, 64, 16, 10, 10),
        bases=("plain",),
    ),
    "hangs": Subject(
        ways=same("neither", "watch", "watch and check"),
        loop=detect,
        sizes=(32, 1, 1, 32, 40, 100),
        bases=("neither",),
        warm_up=50,
    ),
    "preemption": Subject(
        ways=same("plain", "checked"),
        loop=stop,
        sizes=(32, 2, 1, 16, 20, 200),
        bases=("plain",),
        warm_up=50,
    ),
}
SIZES = ("width", "layers", "context", "batch", "rounds", "steps")


def take_round(world: shoal.World, way: str, given: argparse.Namespace) -> float:
    """Return the seconds of a step on this rank's loop, which the first call begins."""
    subject = SUBJECTS[given.what]
    if way not in RUNNING:
        RUNNING[way] = subject.loop(world, given, way)
        for _ in range(subject.warm_up):
            next(RUNNING[way])
    return harness.timed(world, RUNNING[way].__next__, given.steps)


def peak(world: shoal.World) -> float:
    """Return the MiB of the peak of memory."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def agreement(world: shoal.World) -> float:
    """Return the milliseconds from a signal to the last rank until all ranks know, by one clock."""
    stopping = PreemptionHandler(world)
    stopping.start()
    world.barrier()
    sent = time.monotonic()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    while stopping.due() is None:
        time.sleep(1e-4)  # a step
    known = max(world.gather(time.monotonic()))
    stopping.stop()
    return float(known - world.broadcast(sent, source=world.size - 1)) * 1e3


def main() -> None:
    lists: dict[str, Any] = {"what": tuple(SUBJECTS), "ways": [""], "model": ("linear", "gpt")}
    sizes = dict.fromkeys(SIZES, int)
    given = harness.parse(__doc__, **lists, processes=1, compile=("", "inductor"), **sizes)
    subject = SUBJECTS[given.what]
    for name, value in zip(SIZES, subject.sizes, strict=True):
        setattr(given, name, getattr(given, name) or value)
    several_gpus = given.processes > 1 and torch.cuda.is_available()
    ways = [way for way in subject.ways if way in given.ways or given.ways == [""]]
    ways = [way for way in ways if way != "sync" or several_gpus]
    with ExitStack() as open_ranks:
        ranks = {}
        for way in ways:
            options = {"seed": 0, **subject.ways[way]}
            if "exact" in options:
                options["virtual_ranks"] = PER_RANK * given.processes
            ranks[way] = open_ranks.enter_context(Ranks(given.processes, **options))
        turns = {way: partial(each.call, take_round, way, given) for way, each in ranks.items()}
        found = harness.alternate(turns, given.rounds, uncounted=1)  # the first round begins the loops
        rows = harness.time_rows(
            {way: [each[0] for each in rounds] for way, rounds in found.items()},
            *subject.bases,
            summary=subject.summary,
        )
        for row in rows:
            row["peak, MiB"] = ranks[row["loop"]].call(peak)[0]
        if given.what == "preemption":
            until = [ranks["plain"].call(agreement)[0] for _ in range(given.rounds)]
            rows.append({"loop": "from a signal until ranks agree", "ms": harness.quartiles(until)})
    title = f"{given.what}, {given.processes} rank(s), width {given.width}, batch {given.batch}"
    harness.show(f"{title}, {harness.machine()}", rows)
    harness.finish(given, {given.what: rows})


if __name__ == "__main__":
    main()
