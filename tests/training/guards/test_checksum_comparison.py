"""Checksums see any single flipped bit; the comparison of ranks finds the odd one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.training.guards.checksums import sum_bits
from shoal.training.guards.replicas import DifferingTensor, differing_tensors

KINDS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_any_flipped_bit_changes_the_checksum(kind: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).to(kind)
    before = sum_bits({"x": tensor})["x"]
    memory = tensor.view(torch.uint8).numpy()
    for bit in range(8 * memory.size):
        mask = np.uint8(1 << bit % 8)
        memory[bit // 8] ^= mask
        assert sum_bits({"x": tensor})["x"] != before
        memory[bit // 8] ^= mask
    assert sum_bits({"x": tensor})["x"] == before


def test_checksums_of_views_scalars_and_empty_tensors() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": values.t(),
        "row": values[1, 1:],
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0),
    }
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    found = sum_bits(tensors)
    assert list(found) == list(tensors)
    assert found["none"] == 0
    assert sum_bits({n: c for n, c in copies.items() if n != "row"}).items() <= found.items()


def test_the_majority_outvotes_a_rank() -> None:
    ranks = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert differing_tensors([(0, 1, 2)], ranks) == [DifferingTensor(name="b", odd=(2,), outvoted=True)]


def test_two_replicas_have_no_majority() -> None:
    ranks = [{"a": 1}, {"a": 2}, {"a": 5}, {"a": 5}]
    found = differing_tensors([(0, 1), (2, 3)], ranks)
    assert found == [DifferingTensor(name="a", odd=(0, 1), outvoted=False)]


def test_a_tensor_that_a_rank_lacks_differs() -> None:
    found = differing_tensors([(0, 1, 2)], [{"a": 1}, {"a": 1}, {}])
    assert found == [DifferingTensor(name="a", odd=(2,), outvoted=True)]
