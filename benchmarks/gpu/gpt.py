"""A GPT of 354 M parameters on one GPU: Shoal compared with the same in hand-written torch.

python benchmarks/gpu/gpt.py                     # bf16, eager and compiled
python benchmarks/gpu/gpt.py --layers 2 --width 128 --heads 2 --context 64 --rounds 2 --steps 3

Model FLOPs utilization (MFU) is that of Chowdhery et al. 2022: a token costs 6 FLOPs for each parameter
that multiplies and 12 x layers x width x context for attention. It is relative to the peak in the data
sheet of the GPU, or to --peak, in TFLOP/s. Both clip by the global norm, and use the fused AdamW.
Neither reads the loss. Eager loops come first, then both compile the model with its loss, or each of
its blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from measuring import alternate, cells_of, figures_of, parse_options, print_figures, show, since_start
from shoal.telemetry.usage.flops import peak_here

from harness import ratios, spread  # isort: skip
from loops import by_hand, gathered, sequences, through_shoal  # isort: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

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
        return x + self.drop(self.mlp(self.between(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT-2, with dropout of the embedding, of attention and of the residual branches.

    It takes tokens, and returns logits; with their successors too, the sum of the losses.
    """

    def __init__(self, given: argparse.Namespace, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.words = nn.Embedding(given.words, given.width)
        self.places = nn.Embedding(given.context, given.width)
        self.blocks = nn.Sequential(
            *(Block(given.width, given.heads, dropout) for _ in range(given.layers))
        )
        self.norm = nn.LayerNorm(given.width)
        self.head = nn.Linear(given.width, given.words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def objective(model: Any, batch: Any) -> Tensor:
    """Return the mean loss of the hand-written loops."""
    loss: Tensor = model(*batch) / batch[1].numel()
    return loss


TASK = shoal.Task(
    lambda loss, batch: (loss, batch[1].numel()), inputs=lambda batch: (batch[0], batch[1])
)
"""The task of Shoal, for a model that returns the sum of the losses."""


def flops(given: argparse.Namespace) -> float:
    """Return the FLOPs of a token, forward and backward."""
    multiplied = given.layers * 12 * given.width**2 + given.words * given.width
    return float(6 * multiplied + 12 * given.layers * given.width * given.context)


def compare(
    given: argparse.Namespace, data: Any, world: shoal.World, how: str | None, seconds: float
) -> dict[str, Any]:
    """Measure the loops of one kind, print their table, and return their figures."""
    options: dict[str, Any] = {"optimizer": adamw, "clip": 1.0, "precision": "bf16", "compiled": how}

    def hand_written() -> Callable[[], object]:
        loop = by_hand(
            world, GPT(given), data, given.batch, objective=objective, draw=gathered, **options
        )
        return loop.__next__

    def ours() -> Callable[[], object]:
        return through_shoal(world, GPT(given), data, given.batch, task=TASK, **options).__next__

    makers = {"hand-written": hand_written, "Shoal": ours}
    found = alternate(makers, world, rounds=given.rounds, steps=given.steps, seconds=seconds)
    figures = figures_of(found, "hand-written")
    peak = given.peak * 1e12 if given.peak else peak_here(world.device, torch.bfloat16).value
    rows = []
    for name, measured in found.items():
        rates = [given.batch * given.context / each for each in measured.times]
        used = [rate * flops(given) / peak for rate in rates] if peak else []
        if used:
            figures[name]["mfu"] = round(median(used), 4)
        rows.append(
            {
                "loop": name,
                **cells_of(measured),
                "tokens/s": spread(rates),
                "MFU": spread(used) if used else "the peak is unknown: --peak",
                "throughput / hand-written": spread(
                    ratios(found["hand-written"].times, measured.times)
                ),
            }
        )
    kind = f"compiled ({how})" if how else "eager"
    show(f"GPT of {given.layers} layers of {given.width}, bf16, {kind}", rows, world)
    return figures


def main() -> None:
    """Measure, and print."""
    # GPT-2 has 50257 words; a multiple of 128 is faster.
    shape = {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "words": 50304, "batch": 8}
    how = {"rounds": 10, "steps": 10, "peak": float, "compile": ("inductor", "blocks")}
    given = parse_options(__doc__, **shape, **how)
    with shoal.init() as world:
        data = sequences(32 * given.batch, given.context, given.words)
        figures = {"eager": compare(given, data, world, None, 0.4 * given.seconds)}
        print_figures(given, figures, world)  # they are known if compilation takes too long
        if since_start() > 0.6 * given.seconds:
            world.print("compiled: skipped, too little time remains")
        else:
            figures["compiled"] = compare(given, data, world, given.compile, given.seconds)
        print_figures(given, figures, world)


if __name__ == "__main__":
    main()
