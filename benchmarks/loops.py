"""Training loops that benchmarks compare: PyTorch's tutorials and Shoal, on the same model and data."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal

Data = tuple[Tensor, ...]
Optimizer = Callable[[Any], torch.optim.Optimizer]
Objective = Callable[[Any, Any], Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def stack(width: int, layers: int, *last: nn.Module) -> nn.Sequential:
    """Return square linear layers with ReLU, and the last modules."""
    torch.manual_seed(0)
    hidden = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*hidden, *last)


def labelled(samples: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, width, generator=generator)
    return inputs, torch.randint(0, classes, (samples,), generator=generator)


def sequences(samples: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    """Return random tokens, and for each its successor."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (samples, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Transformer(nn.Module):
    """Blocks of torch's encoder layers on tokens; `length` makes them causal."""

    def __init__(self, words: int, width: int, layers: int, length: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if length else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.mask, is_causal=self.mask is not None)
        logits: Tensor = self.head(x)
        return logits


def cross_entropy(output: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction=reduction)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the losses, and their number."""
    return cross_entropy(output, batch[1], "sum"), batch[1].numel()


def mean_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss of the loops by hand."""
    return cross_entropy(model(batch[0]), batch[1])


def wrapped(model: nn.Module, world: shoal.World, *, views: bool = True) -> nn.Module:
    """Return the model under DistributedDataParallel, if there are several ranks."""
    if world.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)


def sampled(world: shoal.World, data: Data, batch: int) -> Callable[[int], Iterable[Any]]:
    """Return the batches of an epoch as tutorials draw them."""
    dataset = TensorDataset(*data)
    sampler: Any = DistributedSampler(dataset, world.size, world.rank) if world.size > 1 else None
    loader = DataLoader(
        dataset,
        batch // world.size,
        shuffle=sampler is None,
        sampler=sampler,
        pin_memory=world.device.type == "cuda",
    )

    def batches(epoch: int) -> Iterable[Any]:
        if sampler is not None:
            sampler.set_epoch(epoch)
        return loader

    return batches


def gathered(world: shoal.World, data: Data, batch: int) -> Callable[[int], Iterable[Any]]:
    """Return the batches of an epoch by one index per tensor, which is quicker than a DataLoader."""

    pin = world.device.type == "cuda"

    def batches(epoch: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(data[0]), generator=generator)[world.rank :: world.size]
        for indices in order.split(batch // world.size):
            drawn = (column[indices] for column in data)
            yield tuple(column.pin_memory() if pin else column for column in drawn)

    return batches


def train(
    model: Any,
    batches: Callable[[int], Iterable[Any]],
    optimizer: torch.optim.Optimizer,
    *,
    objective: Objective = mean_loss,
    clip: float | None = None,
    precision: str = "fp32",
) -> Iterator[None]:
    """Take a step per iteration with a loop by hand."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    for epoch in itertools.count():
        for drawn in batches(epoch):
            batch = [column.to(device, non_blocking=True) for column in drawn]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = objective(model, batch)
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
            yield


def by_hand(
    world: shoal.World,
    model: Any,
    data: Data,
    batch: int,
    *,
    optimizer: Optimizer = adamw,
    draw: Callable[..., Callable[[int], Iterable[Any]]] = sampled,
    compiled: str | None = None,
    **options: Any,
) -> Iterator[None]:
    """Train with DistributedDataParallel as its tutorials do; other options are those of `train`."""
    replica = wrapped(model.to(world.device), world)
    if compiled == "blocks":
        for block in model.blocks:
            block.compile()
    call = torch.compile(replica) if compiled == "inductor" else replica
    return train(call, draw(world, data, batch), optimizer(model.parameters()), **options)


def through_shoal(
    world: shoal.World,
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    batch: int,
    *,
    strategy: Any = None,
    optimizer: Optimizer = adamw,
    task: shoal.Task | None = None,
    clip: float | None = None,
    compiled: str | None = None,
    precision: str = "fp32",
    micro_batches: int = 1,
    **options: Any,
) -> Iterator[shoal.StepResult]:
    """Train with Loader and Step; the other options are those of `parallelize`."""
    made: nn.Module = shoal.parallelize(model, world, strategy, **options)
    step = shoal.Step(
        made,
        optimizer(made.parameters()),
        task or shoal.Task(loss),
        clip=clip,
        compile=compiled,
        precision=precision,
    )
    loader = shoal.Loader(data, world, batch_size=batch, micro_batches=micro_batches)
    for each in loader.epochs(10**9):
        yield step(each)


@contextlib.contextmanager
def quiet_run(
    world: shoal.World, step: shoal.Step | nn.Module, loader: shoal.Loader, **options: Any
) -> Iterator[shoal.Run]:
    """Open a Run in a temporary directory, which prints no progress between the figures."""
    with tempfile.TemporaryDirectory() as directory:
        with contextlib.redirect_stdout(io.StringIO()):
            run = shoal.Run(world.broadcast(directory), step, loader, **options)
        with run:
            yield run
