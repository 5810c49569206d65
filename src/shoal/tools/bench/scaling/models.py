"""The models of studies: built-in residual networks, GPT and dense network, and users' factories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data import Loader
from shoal.distributed.world import World
from shoal.strategies.task import Task
from shoal.tools.bench.measurement import call_target, import_named
from shoal.tools.bench.scaling.configurations import BuiltIn, Factory
from shoal.util.errors import LaunchError, ShoalError

BATCHES = 64
"""Number of samples in an epoch of the synthetic data."""


class Workload(NamedTuple):
    """A training: a module or a function that makes it, its task, and a dataset for a Loader.

    `strategy` is that of `shoal.parallelize`: None for the default one of the layout.
    """

    model: nn.Module | Callable[[], nn.Module]
    task: Task
    dataset: Any
    strategy: Any = None


def make_model(subject: BuiltIn | Factory, batch: int) -> Workload:
    """Return the model, its task and its data for batches of `batch` samples.

    Raises LaunchError if a package is missing, or a factory returns something else.
    """
    if isinstance(subject, Factory):
        given = str(subject)
        return workload_of(call_target(import_named(given, "make"), given), given)
    sizes = subject.sizes
    samples = BATCHES * batch
    if subject.name == "gpt":
        rows = noise_windows(samples, (sizes["context"] + 1,), words=sizes["words"])
        return Workload(lambda: GPT(sizes), Task(_next_words, lambda rows: rows[:, :-1]), rows)
    labels = torch.randint(0, sizes["classes"], (samples,), generator=_generator())
    if subject.name == "dense":
        data = noise_windows(samples, (sizes["inputs"],)), labels
        return Workload(lambda: dense_network(sizes), Task(_classes), data)
    data = noise_windows(samples, (3, sizes["size"], sizes["size"])), labels
    if subject.name == "resnet-small":
        return Workload(lambda: small_resnet(sizes), Task(_classes), data)
    return Workload(lambda: load_resnet(subject.name, sizes["classes"]), Task(_classes), data)


def noise_windows(samples: int, shape: tuple[int, ...], *, words: int = 0) -> Tensor:
    """Return samples of noise, or of `words` different integers, in the memory of little more than one.

    Each is a window of one long row, shifted by one from the one before.
    """
    length = samples + torch.Size(shape).numel()
    if words:
        row = torch.randint(0, words, (length,), generator=_generator())
    else:
        row = torch.randn(length, generator=_generator())
    strides = torch.empty(shape, device="meta").stride()
    return row.as_strided((samples, *shape), (1, *strides))


def dense_network(sizes: Mapping[str, int]) -> nn.Module:
    """Return layers of one width, and a classifier."""
    width, parts = sizes["inputs"], []
    for _ in range(sizes["layers"]):
        parts += [nn.Linear(width, sizes["width"]), nn.GELU()]
        width = sizes["width"]
    return nn.Sequential(*parts, nn.Linear(width, sizes["classes"]))


class Residual(nn.Module):
    """Two convolutions with a skip connection (He et al. 2016).

    It uses group normalization: batch statistics would depend on the number of processes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.between, self.after = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths."""
        through = self.after(self.second(F.relu(self.between(self.first(x)))))
        return F.relu(through + self.around(x))


def small_resnet(sizes: Mapping[str, int]) -> nn.Module:
    """Return three stages of residual blocks, each of half the size and twice the width."""
    width = 8 * max(1, sizes["width"] // 8)
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)]
    before = width
    for stage in range(3):
        for block in range(sizes["blocks"]):
            after = width << stage
            parts.append(Residual(before, after, 2 if stage and not block else 1))
            before = after
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, sizes["classes"])]
    return nn.Sequential(*parts, *end)


def load_resnet(name: str, classes: int) -> nn.Module:
    """Return resnet18, resnet50 or resnet101, from torchvision or from transformers."""
    try:
        from torchvision import models

        made: nn.Module = getattr(models, name)(num_classes=classes)
        return made
    except Exception as error:  # a build for another torch raises RuntimeError
        torchvision = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    try:
        from transformers import ResNetConfig, ResNetForImageClassification
    except ImportError as error:
        raise LaunchError(
            given=f"the model {name}",
            found=f"neither torchvision ({torchvision}) nor transformers ({error}) can be imported",
            fix="run pip install '.[models]' in your Shoal checkout, or use the model resnet-small",
        ) from None
    depths = {"resnet18": [2, 2, 2, 2], "resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}[name]
    basic = name == "resnet18"
    config = ResNetConfig(
        depths=depths,
        layer_type="basic" if basic else "bottleneck",
        hidden_sizes=[64, 128, 256, 512] if basic else [256, 512, 1024, 2048],
        num_labels=classes,
        return_dict=True,
    )
    return Logits(ResNetForImageClassification(config))


class Logits(nn.Module):
    """A model of transformers that returns only the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        scores: Tensor = self.model(images).logits
        return scores


class Block(nn.Module):
    """A pre-norm transformer block: attention and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape (batch, context, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.mlp(self.between(x))
        return x + added


class GPT(nn.Module):
    """A decoder with tied input and output embeddings (Radford et al. 2019)."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        width = sizes["width"]
        self.words = nn.Embedding(sizes["words"], width)
        self.places = nn.Embedding(sizes["context"], width)
        self.blocks = nn.Sequential(*(Block(width, sizes["heads"]) for _ in range(sizes["layers"])))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes["words"], bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def _next_words(output: Tensor, rows: Tensor) -> tuple[Tensor, int]:
    following = rows[:, 1:]
    total = F.cross_entropy(output.flatten(0, 1), following.flatten(), reduction="sum")
    return total, following.numel()


def _classes(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def workload_of(made: object, given: str) -> Workload:
    """Return the workload that the function `given` has returned; LaunchError for other values."""
    match made:
        case (model, Task(), _, *rest) if isinstance(made, tuple) and callable(model) and len(rest) < 2:
            return Workload(*made)
        case tuple():
            types = f"({', '.join(type(each).__name__ for each in made)})"
        case _:
            types = type(made).__name__
    raise LaunchError(
        given=given,
        found=f"it returned {types}, not (model, task, dataset)",
        fix="return model, shoal.Task(loss), dataset; a fourth value is the strategy",
    )


def one_batch(
    made: Workload, batch: int, world: World
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the model of a workload on the device, and a function that computes its mean loss.

    The loss is that of the first `batch` samples. Raises ShoalError if the dataset has fewer.
    """
    model = made.model if isinstance(made.model, nn.Module) else made.model()
    loader = Loader(made.dataset, world, batch_size=batch, shuffle=False)
    first = next(loader.epochs(1))
    if first.size < batch:
        raise ShoalError(
            given=f"a batch of {batch} samples",
            found=f"the dataset has {first.size}",
            fix="return a dataset with more samples; they may be the same tensor",
        )
    micro = first.micros[0]

    def loss(running: nn.Module) -> Tensor:
        total, count = made.task.reduce(made.task.forward(running, micro, 0), micro, 0)
        return total / count

    return model.to(world.device).train(), loss


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
