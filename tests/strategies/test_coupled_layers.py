"""Layers whose numbers depend on the division of a batch are named once, when training begins."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.strategies import engine_of
from shoal.strategies.coupling import observed
from shoal.strategies.coupling.notice import say_division
from shoal.strategies.coupling.observed import digest, first_difference

pytestmark = pytest.mark.processes


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def said(
    world: shoal.World,
    layers: tuple[nn.Module, ...],
    micro: int,
    own: bool,
    ends: str,
    random: str = "ranks",
) -> str:
    """What rank 0 prints in two steps, and in evaluation where `ends` says so."""
    values = torch.ones(32, 4)
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    statistics = "batch" if ends == "covered" else "rank"
    model = shoal.parallelize(model, world, random=random, statistics=statistics)
    if ends == "frozen":
        model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        data = shoal.Loader((values,), world, batch_size=16, micro_batches=micro)
        if ends == "evaluated":
            shoal.evaluate(step, (torch.ones(8, 4),))
        for batch in data.epochs(0 if ends == "evaluated" else 1):
            if own:
                for part in batch:
                    total, count = loss(model(part[0]), part)
                    batch.backward(total=total, count=count, model=model)
                batch.finish(model)
                optimizer.step()
                optimizer.zero_grad()
            else:
                step(batch)
    return printed.getvalue()


BOTH = (nn.BatchNorm1d(4), nn.Dropout(0.5))


@pytest.mark.parametrize("own", [False, True])
def test_layers_that_depend_on_the_division_are_named_once(own: bool, ranks: Ranks) -> None:
    first, second = ranks.call(said, BOTH, 1, own, "")
    assert first.count("\n") == 1
    assert "1 (BatchNorm1d): statistics cover one micro-batch of one rank" in first
    assert "2 (Dropout): each rank draws its own random numbers" in first
    assert "2 data rank(s) and 1 micro-batch(es)" in first
    assert second == ""


def test_dropout_whose_numbers_belong_to_samples_is_not_named(ranks: Ranks) -> None:
    assert ranks.call(said, (nn.Dropout(0.5),), 1, False, "", "samples") == ["", ""]


@pytest.mark.parametrize(
    ("device", "layers", "named"), [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False)]
)
def test_recurrent_layers_that_draw_in_a_library_are_named(
    device: str, layers: int, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(nn.LSTM(4, 4, layers, dropout=0.1), world)
        engine = engine_of(model)
        with patch.object(world, "device", torch.device(device)):
            say_division(engine, 2, compiled=False)
    assert ("the model (LSTM): each rank draws its own" in capsys.readouterr().out) == named


@pytest.mark.parametrize(
    ("layers", "ends"),
    [
        (BOTH, "frozen"),
        (BOTH, "evaluated"),
        ((nn.LayerNorm(4), nn.Dropout(0.0), nn.ReLU()), ""),
        ((nn.BatchNorm1d(4),), "covered"),
    ],
    ids=["eval mode", "evaluation", "others", "statistics over all ranks"],
)
def test_nothing_is_said_of_what_does_not_depend_on_it(
    layers: tuple[nn.Module, ...], ends: str, ranks: Ranks
) -> None:
    assert ranks.call(said, layers, 1, False, ends) == ["", ""]


@pytest.mark.parametrize(("micro", "lines"), [(1, 0), (2, 1)])
def test_one_process_divides_by_micro_batches_only(micro: int, lines: int) -> None:
    with shoal.init(device="cpu") as world:
        assert said(world, BOTH, micro, False, "").count("\n") == lines


class Centered(nn.Module):
    """Couples samples in a way that nobody declared."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Recurrent(nn.Module):
    """Its layers are as many as the samples in half of a micro-batch, and so are its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x[None])[0][0]
        return found


class Steady(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[1:])


def found_coupled(world: shoal.World, layers: tuple[nn.Module, ...], micro: int) -> str:
    values = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 2))
    model = shoal.parallelize(model, world, statistics=8)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for batch in shoal.Loader((values,), world, batch_size=32, micro_batches=micro).epochs(1):
            step(batch)
    return printed.getvalue()


def test_an_undeclared_layer_that_couples_samples_is_named(ranks: Ranks) -> None:
    layers = (nn.BatchNorm1d(4), Steady(), nn.Dropout(0.5), Centered(), nn.Tanh())
    first, second = ranks.call(found_coupled, layers, 1)
    assert "the output of 4 (Centered) for a sample depends on other samples" in first
    assert second == ""


@pytest.mark.parametrize(
    "layers", [(nn.BatchNorm1d(4), Steady(), nn.GELU()), (Noisy(),), (Recurrent(),)], ids=str
)
def test_declared_layers_and_random_draws_are_not_named(
    layers: tuple[nn.Module, ...], ranks: Ranks
) -> None:
    assert ranks.call(found_coupled, layers, 2) == ["", ""]


class Views(nn.Module):
    """Drops parts of two views of each sample, which are far from each other in the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.dropout(torch.cat([x, x + 1]), 0.3).chunk(2)
        return first + second


class Chosen(nn.Module):
    """Draws for the samples that have a property, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        at = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, at, F.dropout(x[at], 0.3))


class Each(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(row, 0.3) for row in x])


class Shuffled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[torch.randperm(len(x))]


class Features(nn.Module):
    """Permutes the columns, of which there may be as many as samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(x.shape[1])]


class Mean(nn.Module):
    """Couples all samples, exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return x - shoal.gather(x).all.mean(0)


class Skipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + torch.from_numpy(np.random.rand(len(x), 1)).to(x)


class NoisyGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return x


class Normalized(nn.Module):
    """Moves its state in each forward pass, by the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.view(-1, 2, 2))
        return found.flatten(1)


class DrawnBuffer(nn.Module):
    """Its buffer is new in each step, and the same in all its micro-batches."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise.normal_()


def spectral() -> nn.Module:
    """Improves its estimate of a norm in each forward pass."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


def found_in_one_micro_batch(world: shoal.World, make: Callable[[], nn.Module]) -> str:
    return found_coupled(world, (make(),), 1)


NOT_OF_SAMPLES = ", or of a module before it, do not belong to samples"
FOUND: list[tuple[Callable[[], nn.Module], str]] = [
    (Views, f"1 (Views){NOT_OF_SAMPLES}"),
    (Chosen, "rows that are not samples, in 1; shoal.samples(index=…) tells the sample of each row"),
    (Each, f"1 (Each){NOT_OF_SAMPLES}"),
    (Shuffled, "torch.randperm has permuted the samples of a micro-batch, in 1; Loader(…, partners=1)"),
    (Features, ""),
    (Mean, ""),
    (Skipped, "draws from the random generators of Python or NumPy"),
    (Normalized, "1.norm (InstanceNorm1d) changes its buffers"),
    (spectral, "(_SpectralNorm) changes its buffers"),
    (DrawnBuffer, ""),
    (lambda: nn.BatchNorm1d(4, track_running_stats=False), ""),
    (lambda: nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.3)), ""),
]


@pytest.mark.parametrize(("make", "found"), FOUND)
def test_what_depends_on_the_split_is_printed(make: Callable[[], nn.Module], found: str) -> None:
    with shoal.init(device="cpu") as world:
        printed = found_coupled(world, (make(),), 2)
    assert found in printed
    assert printed.count("\n") == bool(found)


def mix(x: Tensor, shuffle: Callable[[int], Tensor]) -> Tensor:
    return 0.7 * x + 0.3 * x[shuffle(len(x))]


def train_mixed(world: shoal.World, shuffle: Callable[[int], Tensor], loop: bool) -> str:
    """What is printed in training on samples that are mixed in `inputs` or in a custom loop."""
    model = shoal.parallelize(nn.Linear(4, 2), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = shoal.Task(loss, inputs=lambda batch: mix(batch[0], shuffle))
    step = None if loop else shoal.Step(model, optimizer, task)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for batch in shoal.Loader((torch.arange(64.0).reshape(16, 4),), world, batch_size=8).epochs(1):
            if step is not None:
                step(batch)
                continue
            for (x,) in batch:
                total, count = loss(model(mix(x, shuffle)), (x,))
                batch.backward(total=total, count=count)
            batch.finish(model)
            optimizer.step()
            optimizer.zero_grad()
    return printed.getvalue()


def by_ranks_of_numbers(size: int) -> Tensor:
    return torch.rand(size).argsort()


def test_samples_that_are_mixed_outside_the_model_are_printed(ranks: Ranks) -> None:
    for loop in (False, True):
        said, _ = ranks.call(train_mixed, torch.randperm, loop)
        assert "has permuted the samples of a micro-batch, in code outside the model;" in said
        assert said.count("\n") == 1
    said, _ = ranks.call(train_mixed, by_ranks_of_numbers, False)
    assert f"the model (Linear){NOT_OF_SAMPLES}" in said


def test_draws_of_backward_are_printed_once(ranks: Ranks) -> None:
    first, second = ranks.call(found_coupled, (NoisyGradient(),), 1)
    assert first == "shoal: each rank draws its own random numbers in backward\n"
    assert second == ""


def test_state_that_depends_on_the_number_of_micro_batches_is_that_of_one_process(
    ranks: Ranks,
) -> None:
    assert ranks.call(found_in_one_micro_batch, spectral) == ["", ""]


def test_faint_noise_of_a_rank_is_not_taken_for_coupled_samples() -> None:
    """Its two runs may differ by less than the error of half precision, and its halves by more."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.ones(8, 2, dtype=torch.float64)
    noise = torch.rand(2, 8, 2, generator=generator, dtype=torch.float64)
    key = ("", 0, 4)
    model = nn.Identity()
    halves = [{key: half} for half in (rows + 0.03 * noise[0]).chunk(2)]
    assert first_difference(model, {key: rows}, {key: rows}, halves) == "the model (Identity)"
    assert first_difference(model, {key: rows}, {key: rows + 0.015 * noise[1]}, halves) == ""


def test_digests_of_parts_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.randn(3, size, generator=torch.Generator().manual_seed(size)) for size in (9, 4)]
    monkeypatch.setattr(observed, "_WEIGHTS", 8)
    weights = torch.arange(8).double().cos()
    weighted = rows[0].double() @ torch.cat((weights, weights[:1])) + rows[1].double() @ weights[:4]
    expected = torch.stack((weighted, torch.cat(rows, 1).double().norm(dim=1)), 1)
    for converted in (1, 6, 100):
        monkeypatch.setattr(observed, "_CONVERTED", converted)
        torch.testing.assert_close(digest(rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_of_masks_do_not_overflow(dtype: torch.dtype) -> None:
    mask = torch.full((2, 5), torch.finfo(dtype).min, dtype=dtype)
    mask[1, 4] = 0.0
    found = digest([mask])
    torch.testing.assert_close(found[:, 1], mask.double().norm(dim=1))
    assert found[0, 0] != found[1, 0]
