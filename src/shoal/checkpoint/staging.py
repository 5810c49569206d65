"""A copy of tensors in host memory, laid out as a safetensors file, while training goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.checkpoint.state_tree import DTYPES

BLOCK = 16 << 20
"""Bytes that are hashed and written at a time."""


class Staging:
    """Takes tensors over into one buffer, which the next ones reuse, and gives the file's content.

    https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header, the data
    without gaps. Wide dtypes come first, so that all are aligned. (The library's own writer leaves no
    way to hash and to sync what it writes, and makes copies of its own.)
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._header = b""
        self._bytes = 0

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return len(self._header) + self._bytes

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`; when this returns they may change. Nothing may read `blocks` meanwhile."""
        real = {name: _as_real(tensor) for name, tensor in tensors.items()}
        names = sorted(real, key=lambda name: (-real[name].element_size(), name))
        described: dict[str, object] = {}
        places: dict[str, slice] = {}
        end = 0
        for name in names:
            start, end = end, end + real[name].nbytes
            places[name] = slice(start, end)
            described[name] = {
                "dtype": DTYPES[real[name].dtype],
                "shape": list(real[name].shape),
                "data_offsets": [start, end],
            }
        self._bytes = end
        self._header = _header(described)
        devices = {tensor.device for tensor in real.values() if tensor.device.type == "cuda"}
        if self._buffer.numel() < end or (devices and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # first the old one goes
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        for name in names:
            tensor = real[name]
            target = self._buffer[places[name]].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    def blocks(self) -> list[bytes | memoryview]:
        """The content of the file, in order."""
        data = self._buffer.numpy().data
        starts = range(0, self._bytes, BLOCK)
        return [self._header, *(data[start : min(start + BLOCK, self._bytes)] for start in starts)]


def _header(described: Mapping[str, object]) -> bytes:
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
