"""Buffers that the forward pass changes are refused where they depend on how the batch is split."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.one_process import alone, check_refused
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy, sgd, take
from shoal.strategies.coupling.changed_buffers import OF_COUNT, OF_SAMPLES, dependence, same

pytestmark = pytest.mark.processes


class Keeping(nn.Module):
    """Has a state that changes in training, and that scales its output."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.change(x)
        return x / (2 + self.state.square().mean()).sqrt().to(x)

    def change(self, x: Tensor) -> None:
        raise NotImplementedError


class Average(Keeping):
    """A moving average of its input."""

    def change(self, x: Tensor) -> None:
        self.state.lerp_(x.mean(0), 0.1)


class Usage(Keeping):
    """Counts how often each element was the largest, in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(6, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state += torch.bincount(x.argmax(1), minlength=6)
        return x / (2 + self.state.double().mean()).sqrt()


class Rows(Usage):
    """Counts its samples."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state += len(x)
        return x / (2 + self.state.double().mean()).sqrt()


class Counted(Usage):
    """Counts its forward passes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state += 1
        return x / (2 + self.state.double().mean()).sqrt()


class Collected(Keeping):
    """Replaces its oldest rows by those of all ranks, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(32, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = x / (2 + self.state.square().mean()).sqrt()
        if self.training:
            self.state = torch.cat([shoal.gather(x.detach()).all, self.state])[:32]
        return y


class Declared(shoal.Coupled):
    """The moving average, declared."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups(x)
        mean = groups.sum(x) / groups.sum(x.new_ones(len(x), 1))
        if self.training:
            groups.update(lambda mean: self.state.lerp_(mean, 0.1), mean)
        return x / (2 + self.state.square().mean()).sqrt()


def instance() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(1)
    )


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))


def trained(
    world: shoal.World,
    make: Callable[[], nn.Module],
    micro_batches: int = 1,
    statistics: str = "batch",
    loop: bool = False,
) -> tuple[list[float], str]:
    """The losses of two steps and of an evaluation, and what was printed."""
    torch.manual_seed(3)
    layers = nn.Linear(5, 6), make(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
    model: nn.Module = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (32,), generator=generator)
    split = world.layout.degree("tensor") > 1
    strategy = shoal.TensorParallel(plan={"2": "column", "4": "row"}) if split else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = shoal.parallelize(model, world, strategy, statistics=statistics)
        optimizer = sgd(model)
        step = shoal.Step(model, optimizer, shoal.Task(cross_entropy))
        loader = shoal.Loader((inputs, labels), world, batch_size=16, micro_batches=micro_batches)
        losses = [
            (take(batch, model, optimizer, cross_entropy) if loop else step(batch)).loss
            for batch in loader.epochs(1)
        ]
        losses.append(float(shoal.evaluate(step, (inputs, labels))["loss"]))
    return losses, printed.getvalue()


@pytest.fixture(scope="module", params=["replicate=-1", "shard=-1"], ids=["DDP", "FSDP"])
def either(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2, layout=request.param) as started:
        yield started


@pytest.mark.parametrize("make", [Average, Usage, Rows])
def test_a_buffer_that_depends_on_samples_is_refused(either: Ranks, make: Any) -> None:
    words = [f"1 ({make.__name__}) with the buffer 'state'", OF_SAMPLES, "derive the layer from shoal"]
    check_refused(either, words, trained, make)


@pytest.mark.parametrize("loop", [False, True])
def test_a_counter_of_micro_batches_is_refused(either: Ranks, loop: bool) -> None:
    check_refused(either, ["1 (Counted)", OF_COUNT], trained, Counted, 2, "batch", loop)
    with pytest.raises(shoal.StepError, match=OF_COUNT):
        alone(trained, Counted, 2, "batch", loop)


@pytest.mark.parametrize("make", [Average, Usage])
def test_a_custom_loop_refuses_buffers_that_differ_between_ranks(either: Ranks, make: Any) -> None:
    words = [f"1 ({make.__name__}) with the buffer 'state'", OF_SAMPLES]
    check_refused(either, words, trained, make, 1, "batch", True)


@pytest.mark.parametrize("make", [Counted, Collected, Declared])
def test_a_buffer_that_is_the_same_for_any_split_is_not_refused(either: Ranks, make: Any) -> None:
    expected, _ = alone(trained, make)
    for found, printed in either.call(trained, make):
        assert found == pytest.approx(expected, rel=1e-12)
        assert not printed


def test_tensor_parallelism_refuses_a_counter_of_micro_batches() -> None:
    with Ranks(2, layout="tensor=2") as ranks:
        check_refused(ranks, ["1 (Counted)", OF_COUNT], trained, Counted, 2)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ddp_and_fsdp_give_the_same_numbers_for_buffers_of_rank_0(
    micro_batches: int, loop: bool
) -> None:
    found = []
    for layout in ("replicate=-1", "shard=-1"):
        with Ranks(3, layout=layout) as ranks:
            found += ranks.call(trained, Usage, micro_batches, "rank", loop)
    assert len(found) == 6
    for losses, _ in found:
        assert losses == pytest.approx(found[0][0], rel=1e-12)
    assert "1 (Usage) changes its buffers in each forward pass" in found[0][1]


@pytest.mark.parametrize(
    ("make", "layer"), [(instance, "1.1 (InstanceNorm1d)"), (spectral, "(_SpectralNorm)")]
)
def test_layers_of_torch_are_printed_and_not_refused(
    either: Ranks, make: Callable[[], nn.Module], layer: str
) -> None:
    first, second = (printed for _, printed in either.call(trained, make, 2))
    assert first.count("\n") == 1
    assert f"{layer} changes its buffers in each forward pass" in first
    assert not second


@pytest.mark.parametrize(
    ("make", "lines"), [(Average, 1), (Counted, 1), (Declared, 0), (instance, 0), (spectral, 0)]
)
def test_one_process_with_one_micro_batch_prints_what_would_be_refused(make: Any, lines: int) -> None:
    _, printed = alone(trained, make)
    assert printed.count("raises StepError") == printed.count("\n") == lines


def test_a_buffer_that_grows_with_the_longest_sample_is_no_state() -> None:
    start = torch.arange(6.0)
    assert dependence({"a": start}, {"a": start[:4]}, {"a": start}) == {}
    more = torch.cat([start, start])
    assert dependence({"a": start}, {"a": start[:4]}, {"a": more}) == {"a": OF_SAMPLES}
    assert dependence({"a": start}, {"a": start}, {"a": start + 1}) == {"a": OF_COUNT}
    assert dependence({"a": start}, {"a": start[None]}, {"a": start}) == {"a": OF_SAMPLES}


def test_nan_is_the_same_as_nan() -> None:
    value = torch.tensor([1.0, float("nan")])
    assert same(value, value.clone())
    assert not same(value, F.pad(value, (0, 1)))
    assert not same(value, torch.zeros(2))
