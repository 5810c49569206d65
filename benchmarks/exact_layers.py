"""Errors of data parallelism with dropout, BatchNorm and other draws: torch's DDP and Shoal.

    python benchmarks/exact_layers.py [--ranks 2 4] [--networks GPT ViT]

The networks, the data and the seeds are those of `tests/strategies/test_exact_layers.py`, in float64.
Plain torch is DistributedDataParallel, with one seed on all ranks, the samples of Shoal in the same
order, and losses that are weighted by the counts of the global batch: only the layers differ. Each is
compared with the same loop in one process: the largest relative difference of losses, and of losses,
gradient norms and parameters.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

import shoal
from harness import finish, parse, show, versions
from helpers.batch_norms import trained
from helpers.exact_layers import BATCH, STEPS, WAYS, Case, train
from helpers.exact_models import build, dataset, loss
from helpers.ranks import Ranks
from helpers.reference import LEARNING_RATE, SEED, Trained, distance
from loops import wrapped

SAMPLES = 24
"""Batches are even, as plain torch needs."""
# The loss of Contrastive gathers the rows of ranks.
NETWORKS = {name: name for name in WAYS["DDP"].models if name != "Contrastive"}


def plain(world: shoal.World, name: str) -> Trained:
    """Train in plain torch on the ranks of `world`."""
    model = build(name)
    call = wrapped(model, world, views=False)
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


def both(world: shoal.World, name: str) -> dict[str, Trained]:
    """Train in plain torch and in Shoal."""
    case = Case(name, "DDP", world.size, samples=SAMPLES)
    return {"torch": plain(world, name), "Shoal": train(world, case)}


def main() -> None:
    given = parse(__doc__, ranks=[2, 4], networks=NETWORKS)
    with shoal.init(device="cpu", seed=SEED) as world:
        alone = {name: both(world, name) for name in given.networks}
    rows: dict[str, dict[str, str]] = {name: {"network": name} for name in given.networks}
    for size in given.ranks:
        with Ranks(size, seed=SEED) as ranks:
            for name in given.networks:
                for who, each in ranks.call(both, name)[0].items():
                    expected = alone[name][who]
                    losses = zip(each.losses, expected.losses, strict=True)
                    error = max(abs(ours / theirs - 1) for ours, theirs in losses)
                    rows[name][f"{who} {size}: losses"] = f"{error:.0e}"
                    rows[name][f"{who} {size}: all"] = f"{distance(each, expected):.0e}"
    show(versions("shoal", "torch"), [*rows.values()])
    finish(given, {"exact_layers": [*rows.values()]})


if __name__ == "__main__":
    main()
