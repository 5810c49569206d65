from __future__ import annotations

import torch

from shoal.strategies.data_parallel.tally import tally_dtype, whole, whole_on_device


def test_counts_are_whole_again_after_averaging() -> None:
    for ranks in (3, 7, 1000):
        for count in (1.0, 17.0, 123457.0):
            averaged = float(torch.tensor(count * ranks, dtype=torch.float32) / ranks)
            assert whole(averaged, torch.float32, ranks) == count
            on_device = torch.tensor(averaged, dtype=torch.float64)
            assert whole_on_device(on_device, torch.float32, ranks).item() == count
    assert whole(2.5, torch.float32, 3) == 2.5
    odd = torch.tensor([2.5, torch.inf, torch.nan], dtype=torch.float64)
    assert torch.equal(whole_on_device(odd, torch.float32, 3)[:2], odd[:2])
    assert whole_on_device(odd, torch.float32, 3)[2].isnan()
    assert tally_dtype([torch.zeros(1, dtype=torch.bfloat16)]) == torch.float32
    assert tally_dtype([torch.zeros(1), torch.zeros(1, dtype=torch.complex128)]) == torch.float64
