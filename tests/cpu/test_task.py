from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import DataError, StepError
from shoal.task import Batch, Micro, Noise, Task, Totals, check_loss, correct, default_inputs


def test_the_factor_turns_the_sum_over_the_batch_size_into_the_mean_over_the_count() -> None:
    # Gradients stand for 8 * loss_sum / 10; what is meant is loss_sum / 4.
    decided = correct(Totals(6.0, 4.0, norm=16.0), size=10, scale=8.0, clip=None)
    assert decided.loss == 1.5
    assert decided.factor == 10 / 32
    assert decided.norm == 5.0
    assert decided.finite


@pytest.mark.parametrize(("norm", "clip", "after"), [(5.0, 2.0, 2.0), (5.0, 7.0, 5.0), (0.0, 1.0, 0.0)])
def test_clipping_bounds_the_true_norm_and_never_raises_it(
    norm: float, clip: float, after: float
) -> None:
    decided = correct(Totals(1.0, 4.0, norm=norm * 4.0 * 8.0 / 10), size=10, scale=8.0, clip=clip)
    assert decided.norm == pytest.approx(norm)
    assert decided.factor * norm * 3.2 == pytest.approx(after, rel=1e-6)


def test_clipping_is_that_of_torch() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    decided = correct(Totals(1.0, 1.0, norm=5.0), size=1, scale=1.0, clip=0.5)
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_([parameter], 0.5)
    torch.testing.assert_close(gradient * decided.factor, parameter.grad, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("loss", "count", "norm"),
    [(math.nan, 4, 1), (math.inf, 4, 1), (1, 4, math.inf), (1, 4, math.nan)],
)
def test_what_is_not_a_number_is_not_finite(loss: float, count: float, norm: float) -> None:
    assert not correct(Totals(loss, count, norm), size=4, scale=1.0, clip=1.0).finite


def test_a_batch_that_counts_nothing_has_no_mean() -> None:
    with pytest.raises(StepError, match="count of 0"):
        correct(Totals(0.0, 0.0, 0.0), size=4, scale=1.0, clip=None)


def normal(noise: Noise) -> Tensor:
    return noise.normal(3)


def uniform(noise: Noise) -> Tensor:
    return noise.uniform(2, 2, dtype=torch.float64)


@pytest.mark.parametrize("draw", [normal, uniform])
def test_noise_belongs_to_positions_under_any_split(draw: Callable[[Noise], Tensor]) -> None:
    whole = Noise(7, 100, 6)
    first, second = draw(whole), draw(whole)
    for cuts in ([100, 106], [100, 101, 106], [100, 102, 104, 106]):
        parts = [Noise(7, a, b - a) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat([draw(part) for part in parts]), first)
        assert torch.equal(torch.cat([draw(part) for part in parts]), second)
    assert not torch.equal(first, second)


def test_noise_repeats_at_no_other_position_epoch_or_seed() -> None:
    starts = (0, 50, 5000, 2**62)
    rows = torch.cat([Noise(seed, first, 50).normal(1) for seed in (0, 1, -1) for first in starts])
    assert len(rows.unique()) == len(rows)


def test_noise_has_the_distribution_that_it_says() -> None:
    normal, uniform = Noise(0, 0, 20_000).normal(1), Noise(1, 0, 20_000).uniform(1)
    assert normal.mean().item() == pytest.approx(0.0, abs=0.03)
    assert normal.std().item() == pytest.approx(1.0, abs=0.03)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert uniform.std().item() == pytest.approx(math.sqrt(1 / 12), abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_uniform_noise_never_rounds_up_to_one(dtype: torch.dtype) -> None:
    found = Noise(0, 0, 4).uniform(50_000, dtype=dtype)
    assert found.dtype == dtype
    assert 0 <= found.min() <= found.max() < 1


def test_shapes_of_noise() -> None:
    assert Noise(0, 0, 5).normal().shape == (5,)
    assert Noise(0, 0, 5).uniform(2, 3).shape == (5, 2, 3)


class Called(nn.Module):
    """Returns what it was called with."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return arguments, named


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("inputs", "value", "seen"),
    [
        (None, (1, 2), ((1,), {})),
        (None, [1, 2], ((1,), {})),
        (None, Pair(1, 2), ((1,), {})),
        (None, {"x": 1, "y": 2}, ((), {"x": 1, "y": 2})),
        (lambda batch: batch, (1, 2), ((1, 2), {})),
        (lambda batch: {"x": batch}, 3, ((), {"x": 3})),
        (lambda batch: [batch], 3, (([3],), {})),
    ],
)
def test_how_the_model_is_called(inputs: Any, value: Any, seen: Any) -> None:
    task = Task(lambda output, batch: output, inputs=inputs)
    assert task.forward(Called(), Micro(value, 0, 1, 1.0), 0) == seen


@pytest.mark.parametrize("value", [torch.zeros(3), object(), (), "text"])
def test_a_batch_that_says_nothing_about_the_call(value: Any) -> None:
    with pytest.raises(DataError, match="neither a tuple nor a mapping") as raised:
        default_inputs(value)
    assert "inputs=" in raised.value.fix


def test_noise_goes_to_functions_that_ask_for_it() -> None:
    def inputs(batch: Tensor, noise: Noise) -> Tensor:
        return batch + noise.normal()

    def loss(output: Any, batch: Tensor, *, noise: Noise) -> tuple[Tensor, int]:
        return noise.uniform().sum(), 2

    task, micro = Task(loss, inputs), Micro(torch.zeros(2), 10, 2, 1.0)
    (seen,), _ = task.forward(Called(), micro, 3)
    assert torch.equal(seen, Noise(3, 10, 2).normal())
    assert task.reduce(None, micro, 3)[0] == Noise(3, 10, 2).uniform().sum()


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.zeros(()), "a Tensor instead of a tuple of two"),
        ((torch.zeros(3), 3), r"a loss of shape \(3,\) instead of a tensor without dimensions"),
        ((torch.zeros(1), 1), r"a loss of shape \(1,\) instead of a tensor without dimensions"),
        ((1.0, 3), "a loss of type float instead of a tensor"),
        ((torch.zeros(()), "3"), "a count of type str"),
        ((torch.zeros(()), torch.ones(3)), "a count of type Tensor"),
        (None, "a NoneType instead of a tuple of two"),
    ],
)
def test_losses_of_another_form(result: object, found: str) -> None:
    with pytest.raises(StepError, match=found):
        check_loss(result)


def test_a_count_may_be_a_tensor_of_one() -> None:
    loss = torch.zeros(())
    assert check_loss((loss, torch.tensor([3]))) == (loss, torch.tensor([3]))
    assert check_loss((loss, 2.5)) == (loss, 2.5)


def batch(world: shoal.World | None = None) -> Batch:
    micros = [Micro("a", 40, 2, 1.0), Micro("b", 42, 1, 1.0), Micro("c", 36, 1, 0.0)]
    return Batch(36, 8, micros, seed=1, world=world)


def test_a_batch_knows_where_its_loop_stands() -> None:
    found = batch()
    seen = []
    for value in found:
        seen.append((value, found.micro.first, found.noise.normal().tolist()))
    expected = [("a", 40, 2), ("b", 42, 1), ("c", 36, 1)]
    assert seen == [(v, first, Noise(1, first, n).normal().tolist()) for v, first, n in expected]
    assert len(found) == 3
    with pytest.raises(StepError, match="no micro-batch is under way"):
        found.micro  # noqa: B018


def test_the_share_of_a_batch_leaves_out_stand_ins() -> None:
    assert batch().share == (40, 43)
    assert Batch(36, 8, [Micro("c", 36, 1, 0.0)], seed=1).share == (36, 36)


def test_a_loop_of_ones_own_is_as_exact_as_its_mean(world: shoal.World) -> None:
    torch.manual_seed(0)
    model = shoal.parallelize(nn.Linear(3, 1).double(), world)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    counts = [1, 3]  # as from masks: not the number of samples
    micros = [Micro(inputs[:2], 0, 2, 1.0), Micro(inputs[2:], 2, 3, 1.0)]
    found = Batch(0, 5, micros, seed=0, world=world)
    for values, count in zip(found, counts, strict=True):
        found.backward(model(values).square().sum(), torch.tensor(count))
    finished = found.finish(model, clip=0.25)
    mean = model(inputs).square().sum() / 4
    expected = torch.autograd.grad(mean, list(model.parameters()))
    norm = np.sqrt(sum(float(g.square().sum()) for g in expected))
    assert finished.loss == pytest.approx(mean.item(), rel=1e-12)
    assert finished.norm == pytest.approx(norm, rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 0.25 / (norm + 1e-6), rtol=1e-12, atol=0)


def test_a_loop_of_ones_own_asks_which_of_two_models_learns(world: shoal.World) -> None:
    first, second = (shoal.parallelize(nn.Linear(1, 1), world) for _ in range(2))
    found = Batch(0, 1, [Micro(torch.ones(1, 1), 0, 1, 1.0)], seed=0, world=world)
    for values in found:
        with pytest.raises(StepError, match="2 parallelized models"):
            found.backward(second(first(values)).sum(), 1)
        found.backward(second(first(values)).sum(), 1, second)
    assert all(p.grad is None for p in first.parameters())
    assert all(p.grad is not None for p in second.parameters())


def test_a_loop_of_ones_own_without_an_engine(world: shoal.World) -> None:
    found = Batch(0, 1, [Micro(torch.ones(1, 1), 0, 1, 1.0)], seed=0, world=world)
    model = nn.Linear(1, 1)
    for values in found:
        with pytest.raises(StepError, match="no parallelized model"):
            found.backward(model(values).sum(), 1)


def test_a_loop_of_ones_own_notices_what_is_not_a_number(world: shoal.World) -> None:
    model = shoal.parallelize(nn.Linear(1, 1), world)
    found = Batch(64, 1, [Micro(torch.ones(1, 1), 64, 1, 1.0)], seed=0, world=world)
    for values in found:
        found.backward(model(values).sum() * math.inf, 1)
    with pytest.raises(StepError, match="samples 64 to 64"):
        found.finish(model)
