"""Private names of device meshes and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the dimensions of `mesh` as one, called `name`. Its process group is made once."""
    flat: DeviceMesh = mesh._flatten(name)
    return flat


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh that has the dimensions of all `meshes`, which share a root."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the part of the whole tensor that this rank's shard of `tensor` covers."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
