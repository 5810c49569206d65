"""The backends of process groups: one for the device, and Gloo for what is in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.distributed import mpi
from shoal.distributed.device import RankDevice
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

MPI = "mpi"


def choose_backend(backend: str | None, device: torch.device, lacking: str = "") -> Decision[str]:
    """Return the backend: the given one, else by the device. Raises LaunchError if torch lacks it.

    `lacking` is the reason why the backend of the device can't be used; empty if it can.
    """
    if backend == MPI:
        mpi.require(device)
        return Decision(what="backend", value=MPI, reason=GIVEN)
    own = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    if backend is not None:
        choice = Decision(what="backend", value=backend, reason=GIVEN)
    elif lacking:
        choice = Decision(
            what="backend",
            value="gloo",
            reason=lacking,
            rejected={own: "it needs one GPU per rank"},
        )
    elif own != "gloo":
        choice = Decision(
            what="backend",
            value=own,
            reason=f"the device is {'a GPU' if device.type == 'cuda' else device.type}",
            rejected={"gloo": "it copies tensors of a GPU through host memory"},
        )
    else:
        lacks = "" if dist.is_nccl_available() else f"; torch {torch.__version__} is built without it"
        choice = Decision(
            what="backend",
            value="gloo",
            reason=f"the device is {'a CPU' if device.type == 'cpu' else device.type}",
            rejected={"nccl": f"it needs a CUDA device{lacks}"},
        )
    if not dist.is_backend_available(choice.value):
        here = [name for name in ("gloo", "nccl", "xccl") if dist.is_backend_available(name)]
        raise LaunchError(
            given=f"backend={choice.value!r}",
            found=f"torch {torch.__version__} here supports {', '.join(here)}",
            fix="use backend='gloo' or 'mpi' on CPUs, 'nccl' on NVIDIA and AMD GPUs, or leave it out",
        )
    return choice


def why_shared(everyone: Sequence[RankDevice]) -> str:
    """Return why the backend of GPUs can't serve these ranks, in rank order; empty if it can.

    NCCL needs one GPU per rank. It finds slices of one GPU (MIG) by the address on the PCI bus.
    """
    if all(one.type == "cpu" for one in everyone):
        return ""
    units: dict[tuple[str, str], int] = {}
    addresses: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(everyone):
        if one.type == "cpu":
            return f"rank {rank}, on {one.host}, has no GPU"
        other = units.setdefault((one.host, one.uuid or f"rank {rank}"), rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU of {one.host}"
        other = addresses.setdefault((one.host, one.pci or f"rank {rank}"), rank)
        if other != rank:
            return f"ranks {other} and {rank} have slices (MIG) of one GPU of {one.host}"
    return ""


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
