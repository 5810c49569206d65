"""Accuracy of asynchronous and lossy strategies compared with exact DDP, over several seeds.

    python benchmarks/asynchronous.py [--seeds 5] [--epochs 40] [--steps 80] [--ways …] [--json]

The first task is scanned digits with the network of `examples/digits.py` in float32: the accuracy on
held-out digits after some epochs, with the same learning rate schedule for all. The second is the model
of `examples/bytes_lm.py`: its loss over the last ten steps, averaged over the ranks' local batches. Two
processes, and four for one more Hogwild.
Bytes are those that rank 0 sends in a step by the usual algorithms; Hogwild in shared memory sends
none. Needs the extra `examples`.

Aim: the mean accuracy of every strategy within 0.5 points of that of DDP.
"""

from __future__ import annotations

import importlib.util
import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from harness import ROOT, finish, machine, parse, show
from loops import loss
from shoal.strategies import engine_of
from shoal.strategies.asynchronous.hogwild import HogwildEngine
from shoal.strategies.contracts import Engine
from shoal.strategies.data_parallel.ddp import DDPReducer
from shoal.strategies.data_parallel.local_sgd import AveragingEngine
from shoal.strategies.engine import ReducerEngine

RATE, BATCH = 3e-3, 64
LM_BATCH, CONTEXT, WIDTH, LAYERS, BYTES = 16, 64, 64, 2, 400_000
LAST = 10
"""Number of losses whose mean is the result."""
WAYS: dict[str, Any] = {
    "DDP": shoal.DDP(),
    "fp16": shoal.DDP(compression="fp16"),
    "bf16": shoal.DDP(compression="bf16"),
    "int8": shoal.DDP(compression="int8"),
    "PowerSGD": shoal.DDP(compression=shoal.PowerSGD(rank=4, warmup_steps=20)),
    "TopK": shoal.DDP(compression=shoal.TopK(ratio=0.2)),
    "LocalSGD": shoal.LocalSGD(sync_every=8, warmup_steps=40),
    "DiLoCo": shoal.DiLoCo(sync_every=10),
    "Hogwild": shoal.Hogwild(),
    "Hogwild, at most 4": shoal.Hogwild(max_staleness=4),
}


@dataclass
class Found:
    """The results of a strategy: accuracies by seed, losses of the language model, bytes, staleness."""

    accuracy: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels for training, and others for validation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[:1437], order[1437:]
    return (images[training], labels[training]), (images[held_out], labels[held_out])


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


def accuracy(world: shoal.World, strategy: Any, seed: int, epochs: int) -> tuple[float, Counter[int]]:
    """Return the accuracy on held-out digits, and the staleness of this rank's updates."""
    training, held_out = digits()
    model = shoal.parallelize(network(seed), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = shoal.Loader(training, world, batch_size=BATCH, seed=seed)
    rates = shoal.LRSchedule(warmup_steps=20, min_ratio=0.02)(optimizer, epochs * len(loader))
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0, schedule=rates)
    for batch in loader.epochs(epochs):
        step(batch)
    result = shoal.evaluate(step, held_out, metrics={"accuracy": shoal.Accuracy()})
    engine = engine_of(model)
    stale = Counter(engine.staleness if isinstance(engine, HogwildEngine) else {})
    return float(result["accuracy"]), stale


def language(world: shoal.World, strategy: Any, steps: int) -> tuple[list[float], float]:
    """Return the losses of the steps, averaged over ranks, and the megabytes of a step."""
    example: Any = importlib.util.module_from_spec(SPEC)
    LOADER(example)
    torch.manual_seed(0)
    rows = example.windows(example.read_library(BYTES), CONTEXT)
    model = shoal.parallelize(example.GPT(CONTEXT, WIDTH, LAYERS), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    rates = shoal.LRSchedule(warmup_steps=10, min_ratio=0.1)(optimizer, steps)
    step = shoal.Step(
        model, optimizer, shoal.Task(example.loss, example.inputs), clip=1.0, schedule=rates
    )
    losses = []
    for batch in shoal.Loader(rows, world, batch_size=LM_BATCH).epochs(100):
        losses.append(step(batch).loss)
        if step.number == steps:
            break
    shoal.evaluate(step, rows, batches=1)  # wait for all ranks
    means = [statistics.mean(each) for each in zip(*world.gather(losses), strict=True)]
    return means, sent(engine_of(model), steps) / steps / 1e6


SPEC: Any = importlib.util.spec_from_file_location("bytes_lm", ROOT / "examples/bytes_lm.py")
LOADER: Callable[[Any], None] = SPEC.loader.exec_module


def sent(engine: Engine, steps: int) -> float:
    """Return the bytes that a rank has sent, counted as `Wire` counts them."""
    if isinstance(engine, AveragingEngine):
        return engine.sent
    reducer = engine.reducer if isinstance(engine, ReducerEngine) else None
    if not isinstance(reducer, DDPReducer):
        return 0.0
    if reducer.options.compression is not None:
        return reducer.wire.sent
    ranks = engine.world.size
    return steps * 2 * (ranks - 1) / ranks * sum(p.nbytes for p in reducer.held.parameters)


def measure(names: list[str], seeds: int, epochs: int, steps: int) -> dict[str, Any] | None:
    """Measure on each rank; return the figures on rank 0."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's names of collectives
    found = {name: Found() for name in names}
    with shoal.init(seed=0) as world:
        for seed in range(seeds):
            for name in names:  # in turns, so that drift of the machine affects all
                value, stale = accuracy(world, WAYS[name], seed, epochs)
                found[name].accuracy.append(value)
                world.print(f"seed {seed}, {name}: {value:.2%}")
                both = sum(world.gather(stale), Counter(found[name].staleness))
                found[name].staleness = dict(sorted(both.items()))
        for name in names:
            found[name].losses, found[name].megabytes = language(world, WAYS[name], steps)
        return {name: asdict(each) for name, each in found.items()} if world.is_rank_zero else None


def last(losses: list[float]) -> float:
    """Return the mean of the last losses."""
    return statistics.mean(losses[-LAST:])


def rows_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each strategy."""
    base, plain = statistics.mean(found["DDP"]["accuracy"]), last(found["DDP"]["losses"])
    rows = []
    for name, way in found.items():
        mean, at = statistics.mean(way["accuracy"]), last(way["losses"])
        rows.append(
            {
                "strategy": name,
                "accuracy": f"{mean:.2%}",
                "minus DDP, points": f"{100 * (mean - base):+.2f}",
                "loss": at,
                "minus DDP": f"{at - plain:+.3f}",
                "MB per step": way["megabytes"],
                "updates by others": histogram(way["staleness"]) if way["staleness"] else "",
            }
        )
    return rows


def histogram(staleness: dict[int, int]) -> str:
    """Return the fraction of each number of updates by others between a read and its update."""
    total = sum(staleness.values())
    few = [f"{n}: {staleness.get(n, 0) / total:.1%}" for n in range(8)]
    more = sum(times for n, times in staleness.items() if n > 7) / total
    return ", ".join(few) + f", more: {more:.1%}, at most {max(staleness)}"


def main() -> None:
    given = parse(__doc__, ways=WAYS, seeds=5, epochs=40, steps=80)
    numbers = (given.seeds, given.epochs, given.steps)
    names = [name for name in WAYS if name in {"DDP", *given.ways}]
    found: dict[str, Any] = shoal.launch(measure, names, *numbers, processes=2)[0] or {}
    if "Hogwild" in names:
        four = shoal.launch(measure, ["Hogwild"], *numbers, processes=4)[0] or {}
        found["Hogwild on 4"] = four["Hogwild"]
    show(machine(), rows_of(found))
    finish(given, found)


if __name__ == "__main__":
    main()
