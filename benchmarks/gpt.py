"""A GPT of 354 M parameters on one GPU: Shoal compared with the same in hand-written torch.

python benchmarks/gpt.py                     # bf16, compiled
python benchmarks/gpt.py --layers 2 --width 128 --heads 2 --context 64 --rounds 2 --steps 3

Rounds of steps alternate, so that clocks and heat drift for both. The utilization is that of the
model's FLOPs (Chowdhery et al. 2022): a token costs 6 for each parameter that multiplies and
12 x layers x width x context for attention, against --peak. Both compile the model with its loss,
clip by the global norm, and use the fused AdamW.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from spread import quartiles

WORDS = 50304
"""GPT-2's, rounded up to a size that the GPU multiplies fast."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A model that takes tokens and their successors, and returns the sum of the losses."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, given.width)
        self.places = nn.Embedding(given.context, given.width)
        self.blocks = nn.Sequential(*(Block(given.width, given.heads) for _ in range(given.layers)))
        self.norm = nn.LayerNorm(given.width)
        self.head = nn.Linear(given.width, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def by_hand(given: argparse.Namespace, tokens: Tensor, device: torch.device) -> Callable[[], float]:
    """Return a loop over the batches in plain torch; each call takes the next step."""
    torch.manual_seed(0)
    net = GPT(given).to(device)
    model = torch.compile(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    tokens = tokens.pin_memory() if device.type == "cuda" else tokens
    number = 0

    def step() -> float:
        nonlocal number
        rows = tokens[number * given.batch % len(tokens) :][: given.batch]
        number += 1
        rows = rows.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return 0.0

    return step


def by_shoal(given: argparse.Namespace, tokens: Tensor, world: shoal.World) -> Callable[[], float]:
    """Return the same loop with Shoal."""
    torch.manual_seed(0)
    model = shoal.parallelize(GPT(given), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    task = shoal.Task(
        lambda loss, batch: (loss, batch[1].numel()), inputs=lambda batch: (batch[0], batch[1])
    )
    step = shoal.Step(model, optimizer, task, precision="bf16", clip=1.0, compile="inductor")
    data = shoal.Loader((tokens[:, :-1], tokens[:, 1:]), world, batch_size=given.batch)
    batches = data.epochs(10**9)
    return lambda: step(next(batches)).loss


def timed(step: Callable[[], float], steps: int, device: torch.device) -> float:
    """Return the seconds of a step, the mean of a round."""
    finish: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return (time.perf_counter() - begun) / steps


def flops(given: argparse.Namespace) -> float:
    """Return the FLOPs of a token, forward and backward."""
    multiplied = given.layers * 12 * given.width**2 + WORDS * given.width
    return float(6 * multiplied + 12 * given.layers * given.width * given.context)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    shape = {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "batch": 16}
    for name, value in (shape | {"rounds": 10, "steps": 20}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s; an H100's in bf16")
    given = parser.parse_args()
    with shoal.init() as world:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, WORDS, (given.batch * 32, given.context + 1), generator=generator)
        steps = {
            "hand-written": by_hand(given, tokens, world.device),
            "Shoal": by_shoal(given, tokens, world),
        }
        for step in steps.values():
            timed(step, 5, world.device)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(given.rounds):
            for name in sorted(steps, reverse=number % 2 == 1):
                times[name].append(timed(steps[name], given.steps, world.device))
        cuda = world.device.type == "cuda"
        where = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{where}, torch {torch.__version__}, {given.rounds} rounds of {given.steps} steps")
        for name, found in times.items():
            rates = [given.batch * given.context / seconds for seconds in found]
            used = quartiles([rate * flops(given) / given.peak for rate in rates])
            print(f"{name:>14}  {quartiles(rates).median:12,.0f} tokens/s   MFU {used}")
        ratios = [a / b for a, b in zip(times["hand-written"], times["Shoal"], strict=True)]
        print(f"Shoal's throughput, relative to the hand-written one's: {quartiles(ratios)}")


if __name__ == "__main__":
    main()
