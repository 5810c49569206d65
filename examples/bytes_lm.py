"""A small GPT on the bytes of Python's standard library: bits per byte, compared with gzip and xz.

python examples/bytes_lm.py
shoal run -n 2 examples/bytes_lm.py -- --run runs/bytes-2
python examples/bytes_lm.py --run runs/longer --bytes 10_000_000 --steps 5000 --ema 0.999
shoal run -n 4 examples/bytes_lm.py -- --run runs/four --layout shard=2,tensor=2

`--layout` takes any layout, such as shard=-1, tensor=2, context=2, pipeline=2 or
replicate=2,pipeline=2; the bits per byte stay the same. A minute of training does not reach gzip. "xz+"
is xz after it has read the training files.
"""

import argparse
import gzip
import lzma
import math
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

PADDING = 0  # a byte that Python source never has; it is before a file and after its end


def read_library(wanted: int) -> list[bytes]:
    """Return about `wanted` bytes of files of the standard library, with its packages mixed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if not {"site-packages", "test"} & set(path.parts)]
    files, total = [], 0
    for path in sorted(paths, key=lambda path: (path.name, path)):
        if total < wanted:
            files.append(path.read_bytes().replace(b"\0", b""))
            total += len(files[-1])
    return files


def windows(files: list[bytes], context: int) -> Tensor:
    """Return rows of `context` bytes and the one before; together every byte of every file once."""
    rows = []
    for file in files:
        text = bytes([PADDING]) + file
        for start in range(0, len(file), context):
            rows.append(text[start : start + context + 1].ljust(context + 1, bytes([PADDING])))
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(-1, context + 1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.between(x))
        return x + added


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(self.bytes(text) + self.places)))
        return scores


def inputs(rows: Tensor) -> Tensor:
    return rows[:, :-1].int()


def loss(output: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss sum and the number of bytes, which differs between rows."""
    targets = rows[:, 1:].long().flatten()
    total = F.cross_entropy(output.flatten(0, 1), targets, ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


def strategies(world: shoal.World, options: argparse.Namespace) -> list[Any] | None:
    """Return strategies for the axes of the layout; `replicate` and `shard` alone need none."""
    degree = world.layout.degree
    chosen: list[Any] = []
    if degree("context") > 1:
        chosen.append(shoal.ContextParallel())
    if degree("tensor") > 1:
        chosen.append(shoal.TensorParallel())  # the plan is derived from the model, and printed
    if degree("pipeline") > 1:
        rows = options.batch_size // world.data_size // options.micro_batches
        text = torch.zeros(max(rows, 1), options.context, dtype=torch.int)
        chosen.append(shoal.Pipeline(example_args=(text,)))  # stages are balanced by their cost
    elif chosen and degree("shard") > 1:
        chosen.append(shoal.FSDP())
    return chosen or None


def main(options: argparse.Namespace) -> None:
    files = read_library(options.bytes)
    training = [file for number, file in enumerate(files) if number % 10]
    held_out = files[::10]
    with shoal.init(layout=options.layout, seed=0) as world:
        trained = shoal.train(
            lambda: GPT(options.context, options.width, options.layers),
            shoal.Task(loss, inputs),
            windows(training, options.context),
            directory=options.run,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95)),
            schedule=shoal.LRSchedule(warmup_steps=20, min_ratio=0.1),
            strategy=strategies(world, options),
            batch_size=options.batch_size,
            micro_batches=options.micro_batches,
            steps=options.steps,
            precision=options.precision,
            ema=options.ema,
            clip=1.0,
            world=world,
        )
        with trained.ema.applied() if trained.ema else nullcontext():
            result = shoal.evaluate(trained.step, windows(held_out, options.context))
        known, text = b"".join(training), b"".join(held_out)
        if world.is_rank_zero:
            seen = len(lzma.compress(known + text)) - len(lzma.compress(known))
            sizes = {"gzip": len(gzip.compress(text)), "xz": len(lzma.compress(text)), "xz+": seen}
            print(*(f"{name} {8 * size / len(text):.3f}" for name, size in sizes.items()), sep=", ")
        world.print(f"held-out bits per byte {result['loss'] / math.log(2):.4f} of {len(text):,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/bytes")
    parser.add_argument("--bytes", type=int, default=2_000_000)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--ema", type=float, help="decay of averaged parameters, such as 0.99")
    parser.add_argument("--layout", default="replicate=-1")
    main(parser.parse_args())
