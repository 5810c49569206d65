"""A small model and what the sources do with it in plain torch, as far as several rows share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal

SAMPLES = 48
BATCH = 12  # four batches in an epoch, all of them full: plain torch is exact there too
EPOCHS = 3
RATE = 0.1

State = dict[str, Tensor]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.to(torch.float64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=RATE)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def state(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class InOrder(DistributedSampler[Any]):
    """torch's sampler with Shoal's order in place of its own, so that the same samples meet."""

    def __iter__(self) -> Iterator[int]:
        order = shoal.Permutation(len(self.dataset), seed=0, epoch=self.epoch)  # type: ignore[arg-type]
        return iter(list(order)[self.rank :: self.num_replicas])


def loaders() -> tuple[InOrder, DataLoader[Any]]:
    """The sources' loader: a distributed sampler, and the global batch divided by the ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = InOrder(data(), num_replicas=size, rank=rank)
    return sampler, DataLoader(data(), batch_size=BATCH // size, sampler=sampler)


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range = range(EPOCHS)
) -> list[float]:
    """The sources' training loop; the loss of each step on this rank."""
    sampler, loader = loaders()
    losses = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            value = F.cross_entropy(model(inputs), labels)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return losses


def plain_ddp(bucket_mb: float = 25.0) -> State:
    """The five steps of the sources, but for the group, which is there."""
    model = build()
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    plain(parallel, adam(parallel))
    return state(model)


def converted(
    world: shoal.World, strategy: Any = None, *, micro_batches: int = 1, **options: Any
) -> tuple[State, list[float]]:
    """The same with Shoal: what the model came to, and the loss of each step over all ranks."""
    model = shoal.parallelize(build(), world, strategy)
    step = shoal.Step(model, adam(model), shoal.Task(loss), **options)
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=micro_batches)
    losses = [step(batch).loss for batch in loader.epochs(EPOCHS)]
    return state(model), losses


def assert_same(ours: State, theirs: State, tolerance: float = 1e-11) -> None:
    """Equal tensor by tensor, relative to the largest element; and not because nothing was trained."""
    start = build().state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        scale = max(tensor.abs().max().item(), RATE)
        assert (ours[name] - tensor).abs().max().item() <= tolerance * scale, name
        assert not torch.allclose(tensor.double(), start[name]), f"{name} was never trained"
