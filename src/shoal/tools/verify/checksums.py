"""Checksums of tensors and generators, which change neither."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch.mesh import local_slices

CHUNK = 1 << 20


def checksum_bytes(parts: Iterable[bytes]) -> str:
    """Return the checksum of bytes, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def local_values(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, on the CPU. Raises RuntimeError if its memory is freed."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() and not local.untyped_storage().nbytes():
        raise RuntimeError("FSDP has freed the memory of this tensor")
    return local.detach().cpu().contiguous()


def checksum_tensor(tensor: Tensor) -> str:
    """Return the checksum of the values of this rank's part of a tensor, of its dtype and shape."""
    local = local_values(tensor)
    head = f"{local.dtype}{tuple(local.shape)}".encode()
    return checksum_bytes([head, local.reshape(-1).view(torch.uint8).numpy().tobytes()])


def sketch(tensor: Tensor) -> tuple[str, float, float, tuple[int, ...] | None]:
    """Return the checksum, the norm and a fixed projection of a tensor.

    Of a DTensor, they are those of this rank's shard, followed by the place of its first element in the
    full tensor. The projections of all shards add up to that of the full tensor.
    """
    values = local_values(tensor).reshape(-1).to(torch.float64).numpy()
    place, index = None, np.arange(len(values))
    if isinstance(tensor, DTensor) and tensor.ndim:
        slices = local_slices(tensor)
        place = tuple(each.start for each in slices)
        inside = np.unravel_index(index, tuple(each.stop - each.start for each in slices))
        index = np.ravel_multi_index(
            tuple(at + first for at, first in zip(inside, place, strict=True)), tuple(tensor.shape)
        )
    projection = 0.0
    for start in range(0, len(values), CHUNK):
        chunk = slice(start, start + CHUNK)
        projection += float(values[chunk] @ np.cos(index[chunk].astype(np.float64)))
    return checksum_tensor(tensor), float(np.sqrt(values @ values)), projection, place


def checksum_state(state: Any) -> str:
    """Return the checksum of nested containers of tensors and plain values."""
    return checksum_bytes(_parts(state))


def checksum_generators() -> dict[str, str]:
    """Return the checksums of the states of the Python, NumPy and torch generators."""
    name, key, *position = np.random.get_state(legacy=True)
    return {
        "python": checksum_bytes([repr(random.getstate()).encode()]),
        "numpy": checksum_bytes(
            [str(name).encode(), np.asarray(key).tobytes(), repr(position).encode()]
        ),
        "torch": checksum_bytes([torch.get_rng_state().numpy().tobytes()]),
    }


def _parts(state: Any) -> Iterable[bytes]:
    if isinstance(state, Tensor):
        yield checksum_tensor(state).encode()
    elif isinstance(state, dict):
        for key, value in state.items():
            yield repr(key).encode()
            yield from _parts(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _parts(value)
    else:
        yield repr(state).encode()
