from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from shoal.strategies.correction import Totals, correct, correct_on_device
from shoal.util.errors import StepError


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


def test_a_rank_that_stands_for_itself_may_have_had_no_samples() -> None:
    decided = correct(Totals(0.0, 0.0, 0.0, local=True), size=4, scale=1.0, clip=None)
    assert decided.finite
    assert decided.factor == 0.0


def test_a_rank_that_stands_for_itself_must_count_what_it_had() -> None:
    with pytest.raises(StepError, match="count of 0"):
        correct(Totals(1.0, 0.0, 1.0, local=True), size=4, scale=1.0, clip=None)


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan])
def test_a_loss_over_no_positive_count_is_an_error_whatever_it_sums_to(count: float) -> None:
    with pytest.raises(StepError, match="parameters were not changed"):
        correct(Totals(1.0, count, 1.0), size=4, scale=1.0, clip=None)


NUMBERS = some.floats(allow_subnormal=False)


@given(
    sums=some.tuples(NUMBERS, NUMBERS, NUMBERS.map(abs)),
    size=some.integers(1, 1 << 40),
    clip=some.none() | some.floats(1e-6, 1e6),
)
def test_the_device_decides_as_the_host_to_the_bit(
    sums: tuple[float, float, float], size: int, clip: float | None
) -> None:
    totals = Totals(*sums)
    device = correct_on_device(totals.vector(), size=size, clip=clip, before=None)
    loss, norm, counted, _ = device.values.tolist()
    try:
        host = correct(totals, size=size, scale=1.0, clip=clip)
    except (StepError, OverflowError):
        assert device.skip.item() == 1
        return
    assert device.skip.item() == (not host.finite)
    if host.finite:
        assert (loss, norm, counted, device.factor.item()) == (*host[:3], host.factor)


def test_the_device_skips_the_step_after_one_that_was_skipped() -> None:
    good = Totals(1.0, 4.0, norm=1.0).vector()
    before = torch.ones(())
    assert correct_on_device(good, size=4, clip=None, before=before).skip.item() == 1
    assert correct_on_device(good, size=4, clip=None, before=before * 0).skip.item() == 0
