from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.strategies.held_parameters import as_scalar, global_norm

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def gradients(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(50, 3, generator=generator).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize(
    "dtypes",
    [
        *((dtype,) * 3 for dtype in (*FLOATS, torch.complex64, torch.complex128)),
        (torch.float32, torch.float64, torch.complex64),
    ],
)
def test_the_norm_is_exact_in_at_least_single_precision(dtypes: tuple[torch.dtype, ...]) -> None:
    found = gradients(*dtypes)
    exact = torch.cat([tensor.to(torch.complex128).flatten() for tensor in found]).norm()
    norm = global_norm(found)
    assert norm.dtype in (torch.float32, torch.float64)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


def test_the_norm_does_not_overflow_where_its_gradients_do_not() -> None:
    assert global_norm([torch.full((100,), 6e4, dtype=torch.float16)]).item() == pytest.approx(
        6e5, rel=1e-3
    )


def test_the_norm_of_nothing_is_zero() -> None:
    assert global_norm([]).item() == 0


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_counts_become_scalars_of_the_same_kind(count: int | float | Tensor) -> None:
    found = as_scalar(count, torch.zeros(2, dtype=torch.float64))
    assert (found.dtype, found.shape, found.item()) == (torch.float64, (), 3.0)
