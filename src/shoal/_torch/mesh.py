"""Private names of device meshes and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal._torch.versions import imported, required

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the dimensions of `mesh` as one, called `name`. Its process group is made once."""
    flat: DeviceMesh = required(mesh, "_flatten", "a layout of several axes")(name)
    return flat


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh that has the dimensions of all `meshes`, which share a root."""
    joined: DeviceMesh = required(type(meshes[0]), "_concatenate", "FSDP")(list(meshes))
    return joined


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this rank's shard of `tensor` covers."""
    compute = imported(
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "a sharded model"
    )
    sizes, offsets = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
