"""The first step, in which Shoal tries the batch, later steps, and those of DDP by hand.

    python benchmarks/first_step.py [--models mlp resnet gpt t5] [--rounds 5] [--json]
    python benchmarks/first_step.py --ways ddp shoal --rounds 20

Each way trains in new processes, round by round: `ddp` by hand (with BatchNorm over all ranks, as in
Shoal; torch's SyncBatchNorm runs on GPUs only), a custom loop of Shoal (`loop`), and Shoal's Step with
each layout. Models: linear layers, convolutions with BatchNorm and dropout, and GPT-2 and T5 of
transformers, small ones. Times are CPU seconds of rank 0. `memory` is the peak of resident
memory in the first step, divided by that of later ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import harness
import shoal
from loops import wrapped

BATCH, LATER, CLASSES, WORDS = 32, 7, 10, 1000
MODELS = ("mlp", "resnet", "gpt", "t5")
WAYS = {
    "ddp": "replicate=-1",
    "loop": "replicate=-1",
    "shoal": "replicate=-1",
    "shoal fsdp": "shard=-1",
    "shoal tensor": "tensor=-1",
    "ddp compiled": "replicate=-1",
    "shoal compiled": "replicate=-1",
}
PLANS = {
    "mlp": {"0": "column", "2": "row"},
    "t5": {"*.DenseReluDense.wi": "column", "*.DenseReluDense.wo": "row"},
}
"""Plans of tensor parallelism; convolutions and the layers of GPT-2 are not nn.Linear."""


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.forward(ctx, gradient)


class SyncedNorm(nn.BatchNorm2d):
    """BatchNorm with the statistics of all ranks' samples, each with as many samples."""

    def forward(self, images: Tensor) -> Tensor:
        axes = (0, 2, 3)
        sums: Tensor = SumOverRanks.apply(torch.stack((images.sum(axes), (images * images).sum(axes))))
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        count = ranks * images.numel() / len(sums[0])
        mean, square = sums / count
        variance = square - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(variance * (count / (count - 1)), 0.1)  # type: ignore[union-attr]
        scale: Tensor = self.weight * (variance + self.eps).rsqrt()
        shift: Tensor = self.bias - mean * scale
        return images * scale[:, None, None] + shift[:, None, None]


class Steps(NamedTuple):
    """CPU seconds of the first step and of a later one, and the ratio of their peaks of memory."""

    first: float
    later: float
    memory: float


def build(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model and its data."""
    torch.manual_seed(0)
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        return model, (torch.randn(256, 64), torch.randint(0, CLASSES, (256,)))
    if name == "resnet":
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
        return model, (torch.randn(256, 3, 24, 24), torch.randint(0, CLASSES, (256,)))
    import transformers

    if name == "gpt":
        sizes = {"n_positions": 64, "n_embd": 192, "n_layer": 6, "n_head": 6}
        ends = {"bos_token_id": None, "eos_token_id": None}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes, **ends))
        tokens = torch.randint(0, WORDS, (256, 64))
    else:
        sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 4, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)
        )
        tokens = torch.randint(2, WORDS, (256, 32))
    return model, (tokens, tokens.clone())


def inputs(name: str, batch: Any) -> dict[str, Tensor] | Tensor:
    return {"input_ids": batch[0], "labels": batch[1]} if name == "t5" else batch[0]


def loss(name: str, output: Any, batch: Any, reduction: str = "sum") -> tuple[Tensor, int]:
    targets = batch[1]
    if name in ("gpt", "t5"):
        output = output.logits
    if name == "gpt":
        output, targets = output[:, :-1], targets[:, 1:]
    targets = targets.flatten()
    return F.cross_entropy(output.reshape(len(targets), -1), targets, reduction=reduction), len(targets)


def in_torch(world: shoal.World, name: str, *, compiled: bool) -> Iterator[None]:
    model, data = build(name)
    for place, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            setattr(model, place, SyncedNorm(layer.num_features))
    model = wrapped(model, world)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = torch.utils.data.TensorDataset(*data)
    sampler: Any = torch.utils.data.DistributedSampler(dataset, world.size, world.rank)
    yield
    for batch in torch.utils.data.DataLoader(dataset, BATCH // world.size, sampler=sampler):
        given = inputs(name, batch)
        output = model(**given) if isinstance(given, dict) else model(given)
        mean, _ = loss(name, output, batch, "mean")
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean.item()
        yield


def through_shoal(world: shoal.World, name: str, *, own: bool, compiled: bool) -> Iterator[None]:
    model, data = build(name)
    sharded = world.layout.degree("tensor") > 1
    shoal.parallelize(model, world, shoal.TensorParallel(plan=PLANS[name]) if sharded else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = shoal.Task(partial(loss, name), inputs=partial(inputs, name))
    compiler = "inductor" if compiled else None
    step = None if own else shoal.Step(model, optimizer, task, clip=1.0, compile=compiler)
    yield
    for batch in shoal.Loader(data, world, batch_size=BATCH).epochs(1):
        if step is not None:
            step(batch)
            yield
            continue
        for micro in batch:
            given = inputs(name, micro)
            output = model(**given) if isinstance(given, dict) else model(given)
            total, count = loss(name, output, micro)
            batch.backward(total=total, count=count)
        batch.finish(model, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def peak() -> int:
    """Return the peak of resident memory in kB since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0])


def measure(name: str, way: str) -> Steps:
    with shoal.init(layout=WAYS[way], device="cpu") as world:
        torch.set_num_threads(1)
        compiled = way.endswith("compiled")
        steps = (
            in_torch(world, name, compiled=compiled)
            if way.startswith("ddp")
            else through_shoal(world, name, own=way == "loop", compiled=compiled)
        )
        next(steps)  # model and data exist
        peak()
        begun = time.process_time()
        next(steps)
        first, most = time.process_time() - begun, peak()
        begun = time.process_time()
        for _ in range(LATER):
            next(steps)
        return Steps(first, (time.process_time() - begun) / LATER, most / peak())


def rows(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    ways = [way for way in given.ways if way != "shoal tensor" or name in PLANS]
    turns = {way: partial(shoal.launch, measure, name, way, processes=given.processes) for way in ways}
    found = harness.alternate(turns, given.rounds)
    times = {way: [Steps(*each[0]) for each in own] for way, own in found.items()}
    table = []
    for way, own in times.items():
        plain = "ddp compiled" if way.endswith("compiled") else "ddp"
        by_hand = [each.later for each in times.get(plain, [])]
        later = [each.later for each in own]
        row = {
            "way": way,
            "first, s": harness.spread([each.first for each in own]),
            "later, s": harness.spread(later),
            "first / later": harness.interval([each.first / each.later for each in own]),
            "memory": harness.interval([each.memory for each in own]),
        }
        if by_hand:
            row["later / ddp"] = harness.interval(harness.ratios(later, by_hand))
        table.append(row)
    return table


def main() -> None:
    given = harness.parse(__doc__, models=dict.fromkeys(MODELS), ways=WAYS, processes=2, rounds=5)
    figures = {name: rows(name, given) for name in given.models}
    for name, found in figures.items():
        harness.show(f"{name}, {given.processes} process(es); {harness.machine()}", found)
    harness.finish(given, figures)


if __name__ == "__main__":
    main()
