"""The backends of process groups: one for the device, and Gloo for what is in the host's memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

MPI = "mpi"


def backends(name: str, device: torch.device) -> str:
    """Return what `init_process_group` is given: one backend, or one for the host and one for `device`.

    With both, values of Python and barriers pass through the memory of the host, and neither waits
    for what the device has still to compute.
    """
    return name if device.type == "cpu" or name in ("gloo", MPI) else f"cpu:gloo,{device.type}:{name}"


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend through which a group sends tensors of `device`."""
    given = str(dist.get_backend(group))
    parts = dict(part.split(":") for part in given.split(",")) if ":" in given else {}
    return parts.get(device.type, given)
