from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.data.micro import MicroBatch
from shoal.data.noise import Noise
from shoal.strategies.task import Task, check_loss, default_inputs
from shoal.util.errors import DataError, StepError


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
    assert task.forward(Called(), MicroBatch(value, 0, 1, 1.0), 0) == seen


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

    task, micro = Task(loss, inputs), MicroBatch(torch.zeros(2), 10, 2, 1.0)
    (seen,), _ = task.forward(Called(), micro, 3)
    assert torch.equal(seen, Noise(3, 10, 2).normal())
    assert task.arguments(micro, 3)[0][0].equal(seen)
    assert task.reduce(None, micro, 3)[0] == Noise(3, 10, 2, stream=1).uniform().sum()


def test_streams_of_noise_have_nothing_in_common() -> None:
    one, other = (Noise(3, 10, 1, stream=stream).normal(10_000)[0] for stream in (0, 1))
    assert not set(one.tolist()) & set(other.tolist())
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.05


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.zeros(()), "a Tensor instead of a tuple of two"),
        ((torch.zeros(3), 3), r"a loss of shape \(3,\) instead of a 0-dimensional tensor"),
        ((torch.zeros(1), 1), r"a loss of shape \(1,\) instead of a 0-dimensional tensor"),
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


def test_a_named_stream_is_the_same_in_inputs_and_loss() -> None:
    drawn: dict[str, Tensor] = {}

    def inputs(batch: Tensor, noise: Noise) -> Tensor:
        noise.normal(2)  # moves the stream of the inputs, and no named one
        drawn["inputs"], drawn["again"] = noise.named("added").normal(3), noise.named("added").normal(3)
        return batch

    def loss(output: Tensor, batch: Tensor, noise: Noise) -> tuple[Tensor, int]:
        drawn["loss"], drawn["other"] = noise.named("added").normal(3), noise.named("other").normal(3)
        drawn["own"] = noise.normal(3)
        return output.sum(), len(output)

    micro = MicroBatch(torch.zeros(2, 3), 40, 2, 1.0)
    task = Task(loss, inputs=inputs)
    task.reduce(task.forward(nn.Identity(), micro, 5), micro, 5)
    assert torch.equal(drawn["inputs"], drawn["loss"])
    assert torch.equal(drawn["inputs"], drawn["again"])
    assert not torch.isclose(drawn["loss"], drawn["other"]).any()
    assert not torch.isclose(drawn["loss"], drawn["own"]).any()
    later = Noise(5, 41, 1).named("added").normal(3)
    assert torch.equal(drawn["loss"][1:], later)  # by the position of the sample


@pytest.mark.full
def test_a_denoising_model_learns_from_a_named_stream(world: shoal.World) -> None:
    def inputs(batch: tuple[Tensor], noise: Noise) -> tuple[Tensor]:
        return (batch[0] + noise.named("added").normal(8),)

    def loss(output: Tensor, batch: tuple[Tensor], noise: Noise) -> tuple[Tensor, int]:
        return (output - noise.named("added").normal(8)).square().mean(1).sum(), len(output)

    torch.manual_seed(0)
    model = shoal.parallelize(nn.Linear(8, 8), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, Task(loss, inputs=inputs))
    for batch in shoal.Loader((torch.zeros(512, 8),), world, batch_size=64).epochs(40):
        result = step(batch)
    assert result.loss < 0.01


def test_a_stream_is_named_by_text() -> None:
    with pytest.raises(StepError, match="the name of a stream is a str"):
        Noise(0, 0, 1).named(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy])
def test_a_loss_of_torch_is_no_loss_function(loss: Any) -> None:
    with pytest.raises(StepError, match=r"takes \(output, batch\) and returns \(sum, count\)"):
        Task(loss)
