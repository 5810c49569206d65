"""Time and memory of a step of a GPT with dropout 0.1: torch's random numbers, and those of samples.

    python benchmarks/random_draws.py                # compared with a plain loop
    shoal run -n 4 benchmarks/random_draws.py
    python benchmarks/random_draws.py --compile

"torch" is a plain loop, with DDP on several ranks; ratios are relative to it, within rounds. "ranks" is
Shoal with `random="ranks"`; the difference to "samples" is the cost of the keys. "none" is "ranks" with
dropout 0. Rounds alternate, so that clocks and heat drift for all. Memory is the peak of the process on
CPUs, measured in a process of its own for each way with `--only`, and of the allocator on GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from spread import quartiles, time_steps

WORDS = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.drop(self.mlp(self.between(x)))
        return found


class GPT(nn.Module):
    """A GPT-2 with dropout of the embedding, of attention and of the residual branches."""

    def __init__(self, given: argparse.Namespace, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, given.width)
        self.places = nn.Embedding(given.context, given.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(given.width, given.heads, dropout) for _ in range(given.layers))
        )
        self.norm, self.head = nn.LayerNorm(given.width), nn.Linear(given.width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places.weight)
        found: Tensor = self.head(self.norm(self.blocks(x)))
        return found


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the losses of the tokens, and their number."""
    labels = batch[1].flatten()
    return F.cross_entropy(output.flatten(0, 1), labels, reduction="sum"), labels.numel()


def in_torch(
    given: argparse.Namespace, world: shoal.World, data: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """Return a step of a plain loop, with DDP on several ranks."""
    torch.manual_seed(0)
    model: Any = GPT(given, 0.1).to(world.device)
    if world.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call = torch.compile(model) if given.compile else model
    pairs = zip(data[0].split(given.batch), data[1].split(given.batch), strict=True)
    batches = cycle(
        [
            tuple(each.tensor_split(world.size)[world.rank].to(world.device) for each in pair)
            for pair in pairs
        ]
    )

    def step() -> None:
        batch = next(batches)
        total, count = loss(call(batch[0]), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_shoal(
    given: argparse.Namespace,
    world: shoal.World,
    data: tuple[Tensor, Tensor],
    random: str,
    dropout: float = 0.1,
) -> Callable[[], None]:
    """Return a step through Shoal."""
    torch.manual_seed(0)
    model = shoal.parallelize(GPT(given, dropout), world, random=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile="inductor" if given.compile else None)
    batches = shoal.Loader(data, world, batch_size=given.batch).epochs(10**9)
    return lambda: step(next(batches)) and None


def main() -> None:
    """Print the times of a step, and the ratios to "torch"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    shape = {"layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 16}
    for name, value in (shape | {"rounds": 10, "steps": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", help="measure one way, for its memory")
    given = parser.parse_args()
    with shoal.init(seed=0) as world:
        torch.set_num_threads(1)
        tokens = torch.randint(0, WORDS, (8 * given.batch, given.context + 1))
        data = tokens[:, :-1], tokens[:, 1:]
        makes: dict[str, Callable[[], Callable[[], None]]] = {
            "torch": lambda: in_torch(given, world, data),
            "none": lambda: in_shoal(given, world, data, "ranks", 0.0),
            "ranks": lambda: in_shoal(given, world, data, "ranks"),
            "samples": lambda: in_shoal(given, world, data, "samples"),
        }
        ways = {name: make() for name, make in makes.items() if given.only in (None, name)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        memory: dict[str, int] = {}
        for step in ways.values():
            for _ in range(2):
                step()
        for number in range(given.rounds):
            for name in sorted(ways, reverse=number % 2 == 1):
                seconds, memory[name] = time_steps(ways[name], given.steps, world)
                times[name].append(seconds)
        world.print(
            f"{world.size} rank(s), {given.layers} layers of {given.width}, {given.batch} sequences of "
            f"{given.context} tokens, {world.device}"
        )
        for name, found in times.items():
            ratio = ""
            if "torch" in times:
                pairs = zip(found, times["torch"], strict=True)
                ratio = f", {quartiles([ours / theirs for ours, theirs in pairs])} of torch"
            each = quartiles([1e3 * value for value in found])
            world.print(f"{name:8s} {each} ms{ratio}, {memory[name] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
