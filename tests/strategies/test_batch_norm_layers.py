"""BatchNorm over groups: gradients, precision, modes, subclasses, failures; and layers like it."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.batch_norms import Case, in_groups, specification, train
from helpers.ranks import RankError, Ranks
from helpers.reference import SEED, distance
from shoal.data.coupling import step as coupled_step
from shoal.data.coupling.groups import MicroGroups, groups_of
from shoal.data.coupling.step import CoupledStep
from shoal.strategies.coupling.batch_norm import is_covered

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, seed=SEED) as started:
        yield started


def values(count: int = 10, dtype: torch.dtype = torch.float64, offset: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(count, 4, 3, 3, generator=generator, dtype=torch.float64) + offset).to(dtype)


def layer(kind: Any = nn.BatchNorm2d, **options: Any) -> Any:
    torch.manual_seed(2)
    made = kind(4, **options)
    if made.affine:
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    else:
        made.unused = nn.Parameter(torch.zeros(1))  # a model has something to train
    return made


def one_pass(
    world: shoal.World, made: Any, x: Tensor, statistics: int | str, micro_batches: int = 1
) -> list[tuple[int, Tensor, Tensor, dict[str, Tensor]]]:
    """For each micro-batch of a rank its position, the outputs, gradients of inputs and parameters."""
    model = shoal.parallelize(made, world, statistics=statistics)
    options: Any = {"batch_size": len(x), "micro_batches": micro_batches, "shuffle": False}
    found = []
    for batch in shoal.Loader((x,), world, **options).epochs(1):
        for (part,) in batch:
            inputs = part.clone().requires_grad_()
            y = model(inputs)
            weights = torch.arange(y.numel() // len(y), dtype=y.dtype).cos().view(y.shape[1:])
            micro = batch.micro
            ours = slice(0, micro.samples if micro.weight else 0)
            factor = (torch.arange(len(y)) + micro.first + 1.0).to(y).view(-1, *[1] * (y.dim() - 1))
            (y * weights * factor * micro.weight).sum().backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            for parameter in model.parameters():
                parameter.grad = None
            found.append((micro.first, y.detach()[ours], inputs.grad[ours], gradients))
        world.service(CoupledStep).apply()
    return found


def gathered(
    world: shoal.World, made: Any, x: Tensor, statistics: int | str, micro_batches: int = 1
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients of inputs and of parameters over all ranks, in order, and the buffers."""
    made = copy.deepcopy(made)  # tensors that are sent to processes share memory
    pieces = sorted(
        itertools.chain(*world.gather(one_pass(world, made, x, statistics, micro_batches))),
        key=lambda piece: (piece[0], len(piece[1])),
    )
    sums: dict[str, Tensor] = {}
    for *_, gradients in pieces:
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0) + gradient
    buffers = {name: buffer.clone() for name, buffer in made.named_buffers()}
    return torch.cat([p[1] for p in pieces]), torch.cat([p[2] for p in pieces]), sums, buffers


def in_torch(made: Any, x: Tensor, size: int | None) -> tuple[Any, ...]:
    """The same by torch's own layer, in one process."""
    if size is not None:
        in_groups(made, size)
    inputs = x.clone().requires_grad_()
    y = made(inputs)
    weights = torch.arange(y.numel() // len(y), dtype=y.dtype).cos().view(y.shape[1:])
    factor = (torch.arange(len(y)) + 1.0).to(y).view(-1, *[1] * (y.dim() - 1))
    (y * weights * factor).sum().backward()
    gradients = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
    return y.detach(), inputs.grad, gradients, dict(made.named_buffers())


OPTIONS = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("statistics", "micro_batches"), [("batch", 1), (3, 1), (3, 2), (10, 2)])
def test_outputs_gradients_and_buffers_are_torchs(
    ranks: Ranks, options: dict[str, Any], statistics: int | str, micro_batches: int
) -> None:
    x = values()
    size = statistics if isinstance(statistics, int) else None
    expected = in_torch(layer(**options).double(), x, size)
    for found in ranks.call(gathered, layer(**options).double(), x, statistics, micro_batches):
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(found[2:], expected[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_process_has_torchs_own_bits() -> None:
    x = values()
    expected = in_torch(layer().double(), x, None)
    with shoal.init(device="cpu") as world:
        found = gathered(world, layer().double(), x, "batch")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_float32_is_no_worse_than_torchs(ranks: Ranks, offset: float) -> None:
    x = values(64, offset=offset)
    exact = in_torch(layer().double(), x, None)
    theirs = in_torch(layer(), x.float(), None)
    ours = ranks.call(gathered, layer(), x.float(), "batch")[0]

    def errors(found: Any) -> list[float]:
        return [float((found[part].double() - exact[part]).abs().max()) for part in (0, 1)]

    for own, torchs in zip(errors(ours), errors(theirs), strict=True):
        assert own <= 1.2 * torchs + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_has_the_statistics_of_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    x = values(16, dtype)
    expected = in_torch(layer(), x, None)
    for found in ranks.call(gathered, layer(), x, "batch"):
        assert found[0].dtype == dtype
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.5)
        torch.testing.assert_close(found[3]["running_mean"], expected[3]["running_mean"])


class Own(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a forward of its own, and an activation in it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )
        return F.relu(y)


class Inherited(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("kind", [Own, Inherited])
@pytest.mark.parametrize("statistics", ["batch", 5])
def test_subclasses_keep_their_own_forward(ranks: Ranks, kind: Any, statistics: int | str) -> None:
    x = values()
    size = statistics if isinstance(statistics, int) else None
    expected = in_torch(layer(kind).double(), x, size)
    for found in ranks.call(gathered, layer(kind).double(), x, statistics):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_layer_looks_as_before_and_copies_are_plain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SyncBatchNorm(4))
    shown, state = repr(model), list(model.state_dict())
    with shoal.init(device="cpu") as world:
        shoal.parallelize(model, world)
        assert repr(model) == shown
        assert list(model.state_dict()) == state
        assert isinstance(model[1], nn.BatchNorm1d)
        assert is_covered(model[1])
        copied = copy.deepcopy(model)
        assert type(copied[1]) is nn.BatchNorm1d
        assert not is_covered(copied[1])
        loaded = pickle.loads(pickle.dumps(model[2]))
        assert type(loaded) is nn.SyncBatchNorm
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)


def evaluated(world: shoal.World) -> tuple[Tensor, Tensor, int]:
    """Buffers stay, in eval mode and outside a step as torch has them."""
    model: Any = shoal.parallelize(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), world)
    model[1].eval()  # frozen statistics
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(lambda y, b: (y.square().sum(), len(y))))
    for batch in shoal.Loader((torch.ones(12, 3),), world, batch_size=6, micro_batches=3).epochs(1):
        step(batch)
    frozen = model[1].running_mean.clone()
    model.train()
    with torch.no_grad():
        model(torch.ones(2 + world.rank, 3))  # ranks may do this alone, as torch's update_bn
    return frozen, model[1].running_mean.clone(), int(model[1].num_batches_tracked)


def test_frozen_layers_and_forwards_outside_a_step(ranks: Ranks) -> None:
    for frozen, after, seen in ranks.call(evaluated):
        assert torch.equal(frozen, torch.zeros(4))
        assert not torch.equal(after, frozen)
        assert seen == 1


def failing(world: shoal.World) -> tuple[Tensor, int]:
    model: Any = shoal.parallelize(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(lambda y, b: (y.sum() * float("inf"), len(y))))
    batch = next(iter(shoal.Loader((torch.eye(8, 3),), world, batch_size=8).epochs(1)))
    with pytest.raises(shoal.StepError, match="parameters were not changed"):
        step(batch)
    return model[1].running_mean.clone(), int(model[1].num_batches_tracked)


def test_a_failed_step_leaves_the_running_statistics(ranks: Ranks) -> None:
    for mean, seen in ranks.call(failing):
        assert torch.equal(mean, torch.zeros(4))
        assert seen == 0


def refused(world: shoal.World, strategy: Any, micro_batches: int, rows: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(lambda y, b: (y.sum(), len(y))))
    options: Any = {"batch_size": rows, "micro_batches": micro_batches}
    for batch in shoal.Loader((torch.eye(rows, 3),), world, **options).epochs(1):
        step(batch)


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "rows", "message"),
    [
        (None, 2, 8, "BatchNorm1d 1 with micro_batches=2"),
        (shoal.LocalSGD(), 1, 8, "ranks take their steps separately"),
        (shoal.DiLoCo(), 1, 8, "ranks take their steps separately"),
        (shoal.Hogwild(), 1, 8, "ranks take their steps separately"),
    ],
    ids=["micro-batches", "LocalSGD", "DiLoCo", "Hogwild"],
)
def test_what_cannot_be_is_an_error_on_all_ranks(
    ranks: Ranks, strategy: Any, micro_batches: int, rows: int, message: str
) -> None:
    for result in ranks.attempt(refused, strategy, micro_batches, rows):
        assert isinstance(result, RankError)
        assert isinstance(result.error, shoal.StepError), result.text
        assert message in str(result.error)
        assert "statistics='rank'" in result.error.fix


@pytest.mark.parametrize("wrong", ["sample", 0, 1.5, True])
def test_statistics_are_a_word_or_a_number(wrong: Any) -> None:
    with (
        shoal.init(device="cpu") as world,
        pytest.raises(shoal.StepError, match="neither 'batch' nor 'rank'"),
    ):
        shoal.parallelize(nn.Linear(1, 1), world, statistics=wrong)


def single_value(world: shoal.World) -> None:
    model = shoal.parallelize(nn.BatchNorm1d(3), world, statistics=4)
    (batch,) = shoal.Loader((torch.eye(9, 3),), world, batch_size=9).epochs(1)
    for (x,) in batch:
        model(x)


def test_a_group_of_one_value_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for result in ranks.attempt(single_value):
        assert isinstance(result, RankError)
        assert "a group of one sample" in str(result.error)


def mutated(world: shoal.World, case: Case) -> Any:
    """The training with the boundary between the first two groups of a rank moved by one sample."""
    right = groups_of

    def moved(*arguments: Any, **named: Any) -> MicroGroups:
        groups: MicroGroups = right(*arguments, **named)
        held = [
            (first._replace(stop=first.stop + 1), second._replace(start=second.start + 1), *others)
            for first, second, *others in groups.held
        ]
        return groups._replace(held=tuple(held))

    with patch.object(coupled_step, "groups_of", moved):
        return train(world, case, steps=2)  # batches of two groups for each rank


def test_a_boundary_off_by_one_is_noticed(ranks: Ranks) -> None:
    case = Case("DDP", "replicate=2", 4)
    expected = specification(4, steps=2)
    for found in ranks.call(mutated, case):
        assert distance(found, expected) > 1e-6
    for found in ranks.call(train, case, 2):
        assert distance(found, expected) < 1e-9
