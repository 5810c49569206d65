"""ResNet-50 or ResNet-101 in bf16: images per second with Shoal and with plain DistributedDataParallel.

python benchmarks/gpu/resnet.py                                    # one GPU
shoal run -n 4 benchmarks/gpu/resnet.py --depth 101 --batch 1024   # four
python benchmarks/gpu/resnet.py --depth 50 --width 8 --size 32 --batch 8 --rounds 1 --steps 1

The plain loop is that of the tutorials: autocast, channels_last, SGD, and DDP if there are several
ranks. Images are noise in host memory, as bytes. "Shoal, rank" normalizes over the samples of a rank,
as DDP does; "Shoal, batch" is the default, over the global batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from measuring import alternate, cells_of, figures_of, parse_options, print_figures, show

from harness import ratios, spread  # isort: skip


DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
CLASSES = 1000


class Bottleneck(nn.Module):
    """A bottleneck block (He et al. 2016), with the stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *normalized(inputs, width, 1),
            nn.ReLU(inplace=True),
            *normalized(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *normalized(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(*normalized(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def network(depth: int, width: int) -> nn.Module:
    """Return a ResNet of this depth; its width is 64 in the paper."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [*normalized(3, width, 7, 2), nn.ReLU(inplace=True)]
    parts.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for stage, blocks in enumerate(DEPTHS[depth]):
        for block in range(blocks):
            parts.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
            before = 4 * width << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
    return nn.Sequential(*parts, *head)


def build(given: argparse.Namespace) -> nn.Module:
    """Return the ResNet in the memory format that GPUs prefer."""
    model = network(given.depth, given.width)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def floats(images: Tensor) -> Tensor:
    """Return bytes as numbers around 0."""
    return images.to(memory_format=torch.channels_last).float() / 128 - 1


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)


def plain(
    given: argparse.Namespace, data: tuple[Tensor, Tensor], world: shoal.World
) -> Callable[[], object]:
    """Return a step in plain torch, on this rank's rows of the batch."""
    model = build(given).to(world.device)
    if world.size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if given.compile:
        model = torch.compile(model)  # type: ignore[assignment]
    optimizer = optimizer_of(model)
    pin = world.device.type == "cuda"
    rows = given.batch // world.size
    number = 0

    def step() -> None:
        nonlocal number
        generator = torch.Generator().manual_seed(number)
        number += 1
        drawn = torch.randperm(len(data[0]), generator=generator)[world.rank * rows :][:rows]
        images, labels = (column[drawn] for column in data)
        if pin:
            images, labels = images.pin_memory(), labels.pin_memory()
        images = images.to(world.device, non_blocking=True)
        labels = labels.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(floats(images)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the losses and their number."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def through_shoal(
    given: argparse.Namespace, data: tuple[Tensor, Tensor], world: shoal.World, statistics: str
) -> Callable[[], object]:
    """Return the same step with Shoal."""
    model = shoal.parallelize(build(given), world, statistics=statistics)
    task = shoal.Task(loss, inputs=lambda batch: floats(batch[0]))
    compiler = "inductor" if given.compile else None
    step = shoal.Step(model, optimizer_of(model), task, precision="bf16", compile=compiler)
    batches = shoal.Loader(data, world, batch_size=given.batch).epochs(10**9)
    return lambda: step(next(batches))


def main() -> None:
    """Measure, and print."""
    sizes = {"depth": tuple(DEPTHS), "width": 64, "size": 224, "batch": 256, "rounds": 8, "steps": 10}
    given = parse_options(__doc__, **sizes, compile=False)
    with shoal.init() as world:
        generator = torch.Generator().manual_seed(0)
        samples = 4 * given.batch
        shape = (samples, 3, given.size, given.size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        data = images, torch.randint(0, CLASSES, (samples,), generator=generator)
        makers = {
            "plain": partial(plain, given, data, world),
            "Shoal, rank": partial(through_shoal, given, data, world, "rank"),
            "Shoal, batch": partial(through_shoal, given, data, world, "batch"),
        }
        times = alternate(makers, world, rounds=given.rounds, steps=given.steps, seconds=given.seconds)
        rows = [
            {
                "loop": name,
                **cells_of(found),
                "images/s": spread([given.batch / seconds for seconds in found.times]),
                "throughput / plain": spread(ratios(times["plain"].times, found.times)),
            }
            for name, found in times.items()
        ]
        compiled = ", compiled" if given.compile else ""
        title = f"ResNet-{given.depth}, {given.batch} images of {given.size} px, bf16{compiled}"
        show(title, rows, world)
        print_figures(given, figures_of(times, "plain"), world)


if __name__ == "__main__":
    main()
