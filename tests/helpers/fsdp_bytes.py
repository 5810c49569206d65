"""Bytes that FSDP gathers and reduces in a step in bf16, and those that live after forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal._torch.dispatch import TorchDispatchMode

WIDTH, DEPTH, CLASSES, SAMPLES = 32, 4, 4, 16
WEIGHTS = {(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)}
"""Shapes of the weights of blocks, as stored and as multiplied."""


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Plain(nn.Module):
    """Blocks without norms, whose parameters are nearly all of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Identity()) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Gathered(TorchDispatchMode):
    """Bytes of all-gathers and reduce-scatters, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = str(function)
        if "_allgather_base_" in name:
            self.bytes[f"gathered {arguments[0].dtype}"] += arguments[0].nbytes
        elif "_reduce_scatter_base_" in name:
            self.bytes[f"reduced {arguments[1].dtype}"] += arguments[1].nbytes
        return function(*arguments, **(keywords or {}))


def step_of(world: shoal.World, net: type[nn.Module], strategy: Any, **options: Any) -> shoal.Step:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(net(), world, strategy)
    task = options.pop("task", shoal.Task(loss))
    return shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.05), task, **options)


def batches(world: shoal.World, net: type[nn.Module], **options: Any) -> Iterator[shoal.Batch]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    tokens = torch.randint(0, 10, (SAMPLES,), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = (inputs if net is Plain else tokens, labels)
    yield from shoal.Loader(data, world, batch_size=8, **options).epochs(1)


def measured(world: shoal.World, param_dtype: str | None) -> dict[str, int]:
    """The bytes that one step moves, and those of 16-bit weights of blocks that live after forward."""
    saved: list[Tensor] = []
    alive = 0

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) in WEIGHTS and tensor.dtype == torch.bfloat16:
            saved.append(tensor)
        return tensor

    def count(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal alive
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        alive = sum(storages.values())
        saved.clear()
        return loss(output, batch)

    strategy = shoal.FSDP(param_dtype=param_dtype)
    step = step_of(world, Plain, strategy, precision="bf16", task=shoal.Task(count))
    first, second = batches(world, Plain)
    step(first)
    saved.clear()
    with Gathered() as found, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(second)
    return {**found.bytes, "alive": alive}


def expected() -> tuple[dict[str, int], dict[str, int]]:
    """What `measured` gives with parameters gathered in float32, and in the dtype of the step."""
    blocks = DEPTH * sum(p.numel() for p in Block(nn.Identity()).parameters())
    head = sum(p.numel() for p in nn.Linear(WIDTH, CLASSES).parameters())
    kept = (2 * DEPTH - 1) * 4 * WIDTH * WIDTH  # all but the first weight, whose inputs learn nothing
    reduced = {"reduced torch.float32": 4 * (blocks + head)}
    times = 2 * blocks + head  # of the root once: its parameters stay gathered until backward
    wide = {"gathered torch.float32": 4 * times, **reduced, "alive": 2 * kept}
    return wide, {"gathered torch.bfloat16": 2 * times, **reduced, "alive": 0}
