"""The parameters that Hogwild's workers share are in host memory, wherever a model is."""

from __future__ import annotations

import pytest
import torch

from helpers.fake_devices import Pretended
from shoal.strategies.asynchronous.shared_parameters import SharedMemory


def test_changes_of_a_model_on_another_device_are_added_in_the_hosts_memory() -> None:
    """torch adds no tensor of a GPU to one of the host, in lists of tensors too."""
    values = [torch.ones(3), torch.zeros(2, 2)]
    memory = torch.zeros(1024, dtype=torch.uint8)
    commons = SharedMemory(memory, values, workers=1)
    commons.put(values)
    with Pretended():
        on_device = [torch.full_like(value, 2.0).to(torch.device("cpu", 1)) for value in values]
        with pytest.raises(RuntimeError, match="same device"):
            on_device[0].add_(values[0])
        assert commons.add(0, on_device) == [0]
    assert [each.tolist() for each in commons.snapshot()[1]] == [[3, 3, 3], [[2, 2], [2, 2]]]
