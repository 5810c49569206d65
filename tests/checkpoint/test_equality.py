"""Which difference between the states of ranks counts, and which entry is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.checkpoint import differing, facts

LARGE = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
ONE_OTHER = LARGE.clone()
ONE_OTHER[12_345] += 10

SAME: dict[str, tuple[Any, Any]] = {
    "tensors": (LARGE, LARGE.clone()),
    "the last bits": (LARGE, LARGE * (1 + 1e-7)),
    "the last bits of a number": (0.1 + 0.2, 0.3),
    "nan": (float("nan"), float("nan")),
    "nan in tensors": (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
    "arrays": (np.arange(3), np.arange(3)),
    "nothing": (torch.zeros(0), torch.zeros(0)),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "values": (LARGE, LARGE + 1),
    "one value of many": (LARGE, ONE_OTHER),
    "order": (LARGE[:100], LARGE[:100].flip(0)),
    "shapes": (torch.zeros(2), torch.zeros(3)),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "counts": (torch.tensor(10**12), torch.tensor(10**12 + 1)),
    "truth": (torch.tensor([True, False]), torch.tensor([False, True])),
    "complex": (torch.tensor([1j]), torch.tensor([-1j])),
    "integers": (10**12, 10**12 + 1),
    "floats": (0.5, 0.6),
    "text": ("a", "b"),
    "types": (1, 1.0),
    "arrays": (np.arange(3), np.arange(3)[::-1]),
    "scalars": (np.float32(1), np.float32(2)),
    "nan and a number": (float("nan"), 1.0),
    "infinities": (torch.tensor([float("inf")]), torch.tensor([-float("inf")])),
    "lengths": ([1], [1, 2]),
    "keys": ({"a": 1}, {"b": 1}),
}


def test_what_counts_as_the_same_and_what_differs() -> None:
    for name, (one, other) in SAME.items():
        assert differing([facts({"x": one}), facts({"x": other})]) is None, name
    for name, (one, other) in OTHER.items():
        found = differing([facts({"x": one}), facts({"x": one}), facts({"x": other})])
        assert found == ("x", (2,)), name


def test_the_entry_is_named_by_its_path() -> None:
    ranks = [facts({"ema": {"shadow": [torch.zeros(2), torch.full((2,), rank)]}}) for rank in range(3)]
    assert differing(ranks) == ("ema/shadow/1", (1, 2))


def test_parts_may_have_other_keys_but_no_other_values() -> None:
    stages = [{"ema": {f"{rank}.weight": rank}} for rank in range(2)]
    assert differing([facts(stage, in_parts=True) for stage in stages]) is None
    assert differing([facts(stage) for stage in stages]) == ("ema", (1,))
    lists = [facts({"ema": [rank]}, in_parts=True) for rank in range(2)]
    assert differing(lists) == ("ema/0", (1,))


@pytest.mark.parametrize("array", [np.arange(3, dtype=">i4"), np.longdouble(1)])
def test_an_array_that_torch_lacks_is_left_to_the_save_to_refuse(array: Any) -> None:
    assert facts({"x": array})["x"].kind.startswith("array of")
