"""Checksums of tensors: the sum of their bits as integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@torch.no_grad()
def sum_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor: the sum of its words of up to 64 bits, modulo 2^64.

    A flipped bit changes one word by a power of two, so the sum changes too. The host waits once per
    device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, {})[name] = _sum_words(tensor)
    found: dict[str, int] = {}
    for sums in by_device.values():
        found.update(zip(sums, torch.stack(tuple(sums.values())).tolist(), strict=True))
    return {name: found[name] for name in tensors}


def _sum_words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    offset, size = flat.storage_offset() * flat.element_size(), flat.nbytes
    kind = next(each for each in _WORDS if not (offset % each.itemsize or size % each.itemsize))
    return flat.view(kind).sum(dtype=torch.int64)
