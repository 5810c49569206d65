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
from loops import by_hand, gathered, loss, through_shoal  # isort: skip


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


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)


def mean_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss of the plain loop."""
    return F.cross_entropy(model(floats(batch[0])), batch[1])


TASK = shoal.Task(loss, inputs=lambda batch: floats(batch[0]))


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
        options: dict[str, Any] = {"optimizer": sgd, "precision": "bf16"}
        options["compiled"] = "inductor" if given.compile else None

        def make(train: Callable[..., Any], **more: Any) -> Callable[[], object]:
            loop = train(world, build(given), data, given.batch, **more, **options)
            return loop.__next__  # type: ignore[no-any-return]

        ours = partial(make, through_shoal, task=TASK)
        makers = {
            "plain": partial(make, by_hand, objective=mean_loss, draw=gathered),
            "Shoal, rank": partial(ours, statistics="rank"),
            "Shoal, batch": partial(ours, statistics="batch"),
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
