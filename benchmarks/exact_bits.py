"""The price of `shoal.init(exact="bits")`: step times on several ranks with Gloo, in paired rounds.

    python benchmarks/exact_bits.py [-n 4] [--model linear] [--width 512] [--batch 64]
                                    [--rounds 40] [--steps 10] [--json]

    plain       DistributedDataParallel and DataLoader, one micro-batch per rank
    rounding    Shoal, exact up to rounding, with as many micro-batches as `bits`
    bits        Shoal with exact="bits" and twice as many virtual ranks as ranks

`--model linear` is a stack of linear layers, `gpt` a small causal transformer. Each process has one
thread and deterministic algorithms. `exact` belongs to a World, so each loop runs in its own job. All
jobs stay alive, and wait while another one runs. A round runs some steps of each, in an order that
rotates; a ratio is that of the times of one round, with the 95 % confidence interval of its median.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal
from spread import Spread, interval

SAMPLES, WARM_UP = 2048, 6
PER_RANK = 2
"""Virtual ranks of each rank, and micro-batches of `rounding`."""
LOOPS = ("plain", "rounding", "bits")
AIM = 1.15
"""The aim: at most this ratio of the time of `bits` to that of `rounding`."""
LENGTH, VOCABULARY = 32, 256
"""Tokens of a sequence, and how many there are."""


class CausalTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(tokens), mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def build(model: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    if model == "gpt":
        return CausalTransformer(width)
    layers = (layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers)


def data(model: str, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model == "gpt":
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(SAMPLES, width, generator=generator), torch.arange(SAMPLES) % width


def loss_sum(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="sum")


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return loss_sum(output, batch[1]), batch[1].numel()


def plain(world: shoal.World, options: argparse.Namespace) -> Iterator[None]:
    """Train with the loop of PyTorch's tutorials."""
    model = nn.parallel.DistributedDataParallel(build(options.model, options.width))
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = TensorDataset(*data(options.model, options.width))
    sampler: Any = DistributedSampler(dataset, world.size, world.rank)
    loader = DataLoader(dataset, options.batch // world.size, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            (loss_sum(model(inputs), labels) / labels.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def through_shoal(world: shoal.World, options: argparse.Namespace) -> Iterator[None]:
    """Train with Loader and Step."""
    model = shoal.parallelize(build(options.model, options.width), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters()), shoal.Task(loss))
    loader = shoal.Loader(
        data(options.model, options.width),
        world,
        batch_size=options.batch,
        micro_batches=PER_RANK if world.virtual_ranks is None else 1,
    )
    for batch in loader.epochs(10**9):
        step(batch)
        yield


def serve_rounds(options: argparse.Namespace) -> None:
    """Run rounds of one loop on this rank as the parent asks; report the time of the slowest rank."""
    name, parts = options.loop, PER_RANK * options.processes
    exact = "bits" if name == "bits" else "rounding"
    with (
        shoal.init(device="cpu", deterministic=True, exact=exact, virtual_ranks=parts) as world,
        contextlib.ExitStack() as files,
    ):
        torch.set_num_threads(1)
        loop = (plain if name == "plain" else through_shoal)(world, options)
        take_steps(loop, WARM_UP)
        if world.is_rank_zero:
            asked = files.enter_context(open(options.inside / f"{name}.asked"))
            answers = files.enter_context(open(options.inside / f"{name}.answers", "w", buffering=1))
        while world.broadcast(asked.readline() if world.is_rank_zero else None):
            world.barrier()
            begun = time.perf_counter()
            take_steps(loop, options.steps)
            slowest = max(world.gather(time.perf_counter() - begun))
            if world.is_rank_zero:
                answers.write(f"{slowest / options.steps * 1e3}\n")


def take_steps(loop: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(loop)


class LoopJob:
    """One loop in a job that stays alive; `measure` runs a round of it."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        for kind in ("asked", "answers"):
            os.mkfifo(folder / f"{name}.{kind}")
        shared = ("processes", "model", "width", "batch", "steps")
        again = [f"--{each}={getattr(options, each)}" for each in shared]
        run = [sys.executable, "-m", "shoal", "run", "-n", str(options.processes), __file__, "--"]
        self._job = subprocess.Popen(
            [*run, *again, f"--loop={name}", f"--inside={folder}"],
            stdout=subprocess.DEVNULL,
        )
        # For reading and writing: to open a FIFO for one of them waits for the job, which may fail.
        self._asked = os.open(folder / f"{name}.asked", os.O_RDWR)
        self._answers = os.open(folder / f"{name}.answers", os.O_RDWR)

    def measure(self) -> float:
        """Run one round; return its milliseconds per step."""
        os.write(self._asked, b"round\n")
        while not select.select([self._answers], [], [], 1.0)[0]:
            if self._job.poll() is not None:
                raise SystemExit("a job has failed")
        return float(os.read(self._answers, 1 << 10))

    def close(self) -> None:
        """End the job."""
        os.close(self._asked)
        self._job.wait()
        os.close(self._answers)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of all loops, and the ratios within rounds."""
    times: dict[str, list[float]] = {name: [] for name in LOOPS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as jobs:
        loops = {}
        for name in LOOPS:
            loops[name] = LoopJob(name, options, Path(folder))
            jobs.callback(loops[name].close)
        for number in range(-1, options.rounds):
            turn = number % len(LOOPS)
            for name in LOOPS[turn:] + LOOPS[:turn]:
                found = loops[name].measure()
                if number >= 0:  # the first round wakes the processes up
                    times[name].append(found)
    ratios = {
        f"bits / {other}": asdict(
            interval([a / b for a, b in zip(times["bits"], times[other], strict=True)])
        )
        for other in ("rounding", "plain")
    }
    return {
        "processes": options.processes,
        "model": options.model,
        "width": options.width,
        "batch": options.batch,
        "rounds": options.rounds,
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "ratios": ratios,
        "within_aim": ratios["bits / rounding"]["high"] <= AIM,
    }


def show(figures: dict[str, Any]) -> None:
    print("{processes} processes, {model}, width {width}, batch {batch}".format(**figures))
    for name, value in figures["milliseconds"].items():
        print(f"  {name:<10} {value:9.2f} ms per step (median)")
    for pair, found in figures["ratios"].items():
        print(f"  {pair:<16} {Spread(**found)}")
    print(f"  at most {AIM} times `rounding`: {'yes' if figures['within_aim'] else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-n", "--processes", type=int, default=4)
    parser.add_argument("--model", choices=("linear", "gpt"), default="linear")
    parser.add_argument("--width", type=int, help="of the layers; 512, or 128 for gpt")
    parser.add_argument("--batch", type=int, help="of all processes together; 64, or 32 for gpt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="of a loop in a round")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of the figures")
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    usual = {"linear": (512, 64), "gpt": (128, 32)}[options.model]
    options.width, options.batch = options.width or usual[0], options.batch or usual[1]
    if options.inside is not None:
        serve_rounds(options)
        return
    figures = compare(options)
    show(figures)
    if options.json:
        print(json.dumps({"exact_bits": figures}))


if __name__ == "__main__":
    main()
