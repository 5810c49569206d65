"""Errors of data parallelism with dropout, BatchNorm and other draws: torch's DDP and Shoal.

    python benchmarks/exact_layers.py

The networks, the data and the seeds are those of `tests/strategies/test_exact_layers.py`, in float64.
Plain torch is DistributedDataParallel, with one seed on all ranks, the samples of Shoal in the same
order, and losses that are weighted by the counts of the global batch: only the layers differ. Each is
compared with the same loop in one process.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.batch_norms import trained
from helpers.exact_layers import BATCH, STEPS, WAYS, Case, train
from helpers.exact_models import build, dataset, loss
from helpers.ranks import Ranks
from helpers.reference import LEARNING_RATE, SEED, Trained, distance

SAMPLES = 24
"""Batches are even, as plain torch needs."""


def plain(world: shoal.World, name: str) -> Trained:
    """Train in plain torch on the ranks of `world`."""
    model = build(name)
    call = DistributedDataParallel(model) if world.size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs, labels = dataset(name, SAMPLES)
    torch.manual_seed(SEED)
    losses: list[float] = []
    norms: list[float] = []
    for epoch in itertools.count():
        order = shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES)
        for batch in torch.from_numpy(order).split(BATCH):
            own = batch.chunk(world.size)[world.rank]
            total, counted = loss(call(inputs[own]), (None, labels[own]))
            count = world.all_reduce(torch.as_tensor(float(counted)))
            (total * world.size / count).backward()  # DDP divides by the number of ranks
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(world.all_reduce(total.detach()) / count))
            if len(losses) == STEPS:
                return trained(model, norms, losses)
    raise AssertionError


def main() -> None:
    """Print the largest relative difference of losses, gradient norms and parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    # The loss of Contrastive gathers the rows of ranks.
    names = [name for name in WAYS["DDP"].models if name != "Contrastive"]
    with shoal.init(device="cpu", seed=SEED) as world:
        alone = {name: plain(world, name) for name in names}
        specified = {name: train(world, Case(name, "DDP", 1, samples=SAMPLES)) for name in names}
    found: dict[str, list[str]] = {name: [] for name in names}
    for size in given.ranks:
        with Ranks(size, seed=SEED) as ranks:
            for name in names:
                for each, expected in (
                    (ranks.call(plain, name)[0], alone[name]),
                    (ranks.call(train, Case(name, "DDP", size, samples=SAMPLES))[0], specified[name]),
                ):
                    losses = zip(each.losses, expected.losses, strict=True)
                    error = max(abs(ours / theirs - 1) for ours, theirs in losses)
                    found[name] += [f"{error:.0e}", f"{distance(each, expected):.0e}"]
    heads = [f"{who} {size}" for size in given.ranks for who in ("torch", "Shoal")]
    print(" " * 8, *(f"{head:>16}" for head in heads))
    print(" " * 8, *(f"{'losses':>8}{'all':>8}" for _ in heads))
    for name, errors in found.items():
        pairs = zip(errors[::2], errors[1::2], strict=True)
        print(f"{name:8}", *(f"{one:>8}{other:>8}" for one, other in pairs))


if __name__ == "__main__":
    main()
