"""Forwards that tracing may misread: each computes what one process does, or raises a clear error."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.jit._trace import is_tracing
from torch.utils.checkpoint import checkpoint

import shoal
from helpers.ranks import RankError, Ranks
from shoal.util.errors import StepError

LAYOUT = "pipeline=2"
pytestmark = pytest.mark.processes

WIDTH, SAMPLES, STEPS = 6, 27, 3


class Net(nn.Module):
    """What is awkward is `enter`, before the first module, and `leave`, after the last one."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head: Any = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("places", torch.randn(WIDTH))

    def enter(self, x: Any) -> Any:
        return x

    def leave(self, h: Any) -> Any:
        return h

    def forward(self, x: Any) -> Any:
        h = self.first(self.enter(x))
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(self.leave(h))


class IsInstance(Net):
    def enter(self, x: Any) -> Any:
        return 0.5 * x if isinstance(x, Tensor) else x


class IsTensor(Net):
    def leave(self, h: Any) -> Any:
        return 0.5 * h if torch.is_tensor(h) else h


class NoContainer(Net):
    def enter(self, x: Any) -> Any:
        return x[0] if isinstance(x, tuple | list | dict) else x

    def leave(self, h: Any) -> Any:
        return self.enter(h)


class NotNone(Net):
    def enter(self, x: Any) -> Any:
        return 2 * x if x is not None else torch.zeros(1)


class Attributes(Net):
    def enter(self, x: Any) -> Any:
        if hasattr(x, "logits"):
            x = x.logits
        if hasattr(x, "shape"):
            x = 2 * x
        return x if getattr(x, "mask", None) is None else x.mask


class AskingModules(Net):
    def leave(self, h: Any) -> Any:
        linear = sum(isinstance(block, nn.Linear) for block in self.blocks)
        return h * linear * len(self.blocks) * self.head.out_features


class AskingParameters(Net):
    def leave(self, h: Any) -> Any:
        scale = self.places if isinstance(self.places, nn.Parameter) else 2 * self.places
        return h * (scale if isinstance(scale, Tensor) else 0)


class AskingForTracing(Net):
    def enter(self, x: Any) -> Any:
        return x if is_tracing() or is_scripting() else 2 * x


class Keywords(Net):
    def forward(self, x: Any, scale: Any = None, *, shift: tuple[float, float] = (1.0, 2.0)) -> Any:
        h = super().forward(x)
        return (h if scale is None else h * scale) + shift[1]


class Nested(Net):
    def enter(self, x: Any) -> Any:
        first, second = x["pair"]
        return first + second


class Pairs(Net):
    """Modules that return tuples."""

    class Both(nn.Module):
        def forward(self, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return h, {"double": 2 * h}

    def __init__(self) -> None:
        super().__init__()
        self.both = self.Both()

    def leave(self, h: Any) -> Any:
        one, other = self.both(h)
        return one + other["double"]


class AddingInPlace(Net):
    def leave(self, h: Any) -> Any:
        h = h + 1
        h *= 2
        return h.sub_(1)


def doubled(self: Net, x: Tensor) -> Any:
    return Net.forward(self, 2 * x)


class OwnForward(Net):
    """A forward that is set on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = MethodType(doubled, self)  # type: ignore[method-assign]


class Uncallable(Net):
    def enter(self, x: Any) -> Any:
        return x if callable(x) else 2 * x


class Arange(Net):
    def enter(self, x: Any) -> Any:
        return x + torch.arange(x.shape[1])


class Counted(nn.Module):
    """A block that counts its calls in a buffer, and draws in training."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h * (1 + self.calls)


class Counters(Net):
    """Proving the model leaves no trace in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head, Counted())


EQUAL = [
    *(IsInstance, IsTensor, NoContainer, NotNone, Attributes, AskingModules, AskingParameters),
    *(
        AskingForTracing,
        Keywords,
        Nested,
        Pairs,
        AddingInPlace,
        OwnForward,
        Uncallable,
        Arange,
        Counters,
    ),
]


class Tied(Net):
    """A parameter that the forward uses by its second name."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Any = nn.Module()
        self.other.weight = self.head.weight

    def leave(self, h: Any) -> Any:
        return F.linear(h, self.other.weight)


class ExactClass(Net):
    def enter(self, x: Any) -> Any:
        return 2 * x if type(x) is Tensor else x


class ExactClassLate(Net):
    def leave(self, h: Any) -> Any:
        return 2 * h if type(h) is Tensor else h


class Matching(Net):
    """Pattern matching asks in a way that no proxy can answer."""

    def leave(self, h: Any) -> Any:
        match h:
            case Tensor():
                return 2 * h
        return h


class Replaced(Net):
    """A forward that is bound to this one object."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = partial(doubled, self)  # type: ignore[method-assign]


class PositionalInPlace(Net):
    """The input is changed in the first stage; the last one uses it too."""

    def forward(self, x: Any) -> Any:
        F.relu(x, True)
        return super().forward(x) + x


class Tuples(Pairs):
    """A module's output is asked for its class, and is no tensor."""

    def leave(self, h: Any) -> Any:
        out = self.both(h)
        return out[0] if isinstance(out, tuple) else out


class Shapes(Net):
    def enter(self, x: Any) -> Any:
        return x if x.shape[0] > 3 else 2 * x


class Dtypes(Net):
    def enter(self, x: Any) -> Any:
        return x if x.dtype == torch.float64 else 2 * x


class Floats(Net):
    def enter(self, x: Any) -> Any:
        return x if x.is_floating_point() else 2 * x


class Values(Net):
    def leave(self, h: Any) -> Any:
        while h.norm() > 1:
            h = h / 2
        return h


class Loops(Net):
    def enter(self, x: Any) -> Any:
        for _ in range(x.shape[1]):
            x = x + 1
        return x


class Zeros(Net):
    def enter(self, x: Any) -> Any:
        return x + torch.zeros(WIDTH)


class LayerDrop(Net):
    def leave(self, h: Any) -> Any:
        return h if random.random() < 0.5 else 2 * h


class TorchDrop(Net):
    def leave(self, h: Any) -> Any:
        return h if float(torch.rand(())) < 0.5 else 2 * h


class NoGrad(Net):
    def enter(self, x: Any) -> Any:
        with torch.no_grad():
            return self.first(x)


class DecoratedNoGrad(Net):
    @torch.no_grad()
    def leave(self, h: Any) -> Any:
        return h + 1


class Autocast(Net):
    def leave(self, h: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return h @ h.T @ h


class Checkpointed(Net):
    def enter(self, x: Any) -> Any:
        return checkpoint(self.first, x, use_reentrant=False)


class CheckpointedAnew(Net):
    def enter(self, x: Any) -> Any:
        return checkpoint(self.first, x, use_reentrant=True)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


reverse = Reversed.apply


class Reversing(Net):
    def leave(self, h: Any) -> Any:
        return reverse(h)


class Counting(Net):
    calls = 0

    def enter(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


class Keeping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def leave(self, h: Any) -> Any:
        self.kept.append(h)
        return h


calls = itertools.count(1)


class CountingOutside(Net):
    def enter(self, x: Any) -> Any:
        return x * next(calls)


class AskingForGradients(Net):
    def leave(self, h: Any) -> Any:
        return h if torch.is_grad_enabled() else 2 * h


class AskingForAutocast(Net):
    def leave(self, h: Any) -> Any:
        return h if torch.is_autocast_enabled("cpu") else 2 * h


class AskingForTheMode(Net):
    def leave(self, h: Any) -> Any:
        return h if self.head.training else 2 * h


class Setting(Net):
    def enter(self, x: Any) -> Any:
        x.scale = 2
        return x


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: 2 * output)


NOT_WHOLE = "the split model differs from the original model: "
HERE = "test_awkward_forwards.py:"

REFUSED: list[tuple[type[Net], str]] = [
    (ExactClass, f"{NOT_WHOLE}the input of first differs"),
    (ExactClassLate, f"{NOT_WHOLE}the input of head differs"),
    (Matching, f"{NOT_WHOLE}the input of head differs"),
    (Tied, "parameters that its forward does not use: other.weight"),
    (Replaced, "the forward of a Replaced was replaced on the object"),
    (PositionalInPlace, "its forward changes x in place"),
    (Tuples, "the value is a tuple; the stages were traced with a tensor"),
    (Shapes, HERE),
    (Dtypes, HERE),
    (Floats, HERE),
    (Values, HERE),
    (Loops, HERE),
    (Zeros, "creates tensors without inputs"),
    (LayerDrop, "draws random numbers"),
    (TorchDrop, "draws random numbers"),
    (NoGrad, "it changes a setting"),
    (DecoratedNoGrad, "it changes a setting"),
    (Autocast, "it changes a setting"),
    (Checkpointed, "torch.utils.checkpoint"),
    (CheckpointedAnew, "torch.utils.checkpoint"),
    (Reversing, "torch.autograd.Function"),
    (Counting, "stores values in attributes of the model: calls"),
    (Keeping, "stores values in attributes of the model: kept"),
    (CountingOutside, "does not compute the same each time"),
    (AskingForGradients, "does not compute the same with gradients as without them"),
    (AskingForAutocast, "does not compute the same under autocast as without it"),
    (AskingForTheMode, "does not compute the same in training as in evaluation"),
    (Setting, "it sets the attribute 'scale' of a value"),
    (Hooked, "the model itself has hooks"),
]

PIPELINE = shoal.Pipeline(split_points=("blocks.1",))
REMOTE = shoal.RPCPipeline(
    stages={"front": ("first", "blocks.0"), "back": ("blocks.1", "blocks.2", "head")}
)
STRATEGIES = [
    pytest.param(PIPELINE, id="pipeline"),
    pytest.param(REMOTE, id="remote", marks=pytest.mark.full),  # the same stages, moved by RPC
]


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return values, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def inputs(make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> Any:
    return ({"pair": (batch[0], batch[1])},) if make is Nested else (batch[0],)


def log(
    world: shoal.World, strategy: Any, make: Callable[[], nn.Module], precision: str = "fp32"
) -> list[float]:
    """The losses of a training, and those of its evaluation."""
    torch.manual_seed(2)
    model = shoal.parallelize(make().double(), world, strategy)
    task = shoal.Task(loss, inputs=partial(inputs, make))
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task, precision=precision)
    data = shoal.Loader(dataset(), world, batch_size=8, micro_batches=2)
    losses = [step(batch).loss for batch in itertools.islice(data.epochs(9), STEPS)]
    return [*losses, shoal.evaluate(step, dataset(), batch_size=8)["loss"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "make",
    [*EQUAL[::2], *(pytest.param(make, marks=pytest.mark.full) for make in EQUAL[1::2])],
)
def test_the_numbers_are_those_of_one_process(ranks: Ranks, make: type[Net], strategy: Any) -> None:
    with shoal.init() as world:
        expected = log(world, None, make)
    for result in ranks.call(log, strategy, make):
        assert result == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("make", "found"), REFUSED)
def test_a_forward_that_cannot_be_cut_raises_on_all_ranks(
    ranks: Ranks, make: type[Net], found: str, strategy: Any
) -> None:
    for result in ranks.attempt(log, strategy, make):
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError)
        assert found in str(result.error)
