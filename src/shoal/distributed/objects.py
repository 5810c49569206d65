"""Python values sent between ranks over a process group, encoded by `codec`, never by pickle."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shoal._torch.c10d import device_types
from shoal.distributed import codec
from shoal.util.errors import AgreementError

_SENT, _FAILED = b"\0", b"\1"


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks on all ranks, in rank order. Collective; raises AgreementError."""
    parts = _padded(encode(value), group)
    received = [torch.empty_like(parts.mine) for _ in parts.sizes]
    dist.all_gather(received, parts.mine, group=group)
    return parts.read(received)


def gather_numbers(number: int, group: dist.ProcessGroup) -> list[int]:
    """Return the number of each rank, in the order of ranks. Collective."""
    mine = torch.tensor([number], device=_device(group))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    numbers: list[int] = torch.cat(everyone).tolist()
    return numbers


def barrier(group: dist.ProcessGroup) -> None:
    """Wait until every rank of the group has called this. Collective."""
    arrived = torch.zeros((), device=_device(group))
    dist.all_reduce(arrived, group=group)
    arrived.item()  # on a GPU only the stream has waited so far


def collect(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks on the first rank of the group, [] elsewhere. Collective."""
    parts = _padded(encode(value), group)
    first = group.rank() == 0
    received = [torch.empty_like(parts.mine) for _ in parts.sizes] if first else None
    dist.gather(parts.mine, received, group=group, group_dst=0)
    return parts.read(received or [])


def broadcast(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """Return the value of rank `source` on all ranks. Collective; raises AgreementError."""
    device = _device(group)
    mine = group.rank() == source
    data = encode(value) if mine else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    buffer = _bytes(data, device) if mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    found = decode(_content(buffer), source)
    return value if mine else found


def send(value: Any, group: dist.ProcessGroup, to: int) -> None:
    """Send a value to one rank, which calls `receive`."""
    device, data = _device(group), encode(value)
    dist.send(torch.tensor([len(data)], device=device), group=group, group_dst=to)
    dist.send(_bytes(data, device), group=group, group_dst=to)


def receive(group: dist.ProcessGroup, source: int) -> Any:
    """Return the value that rank `source` sends. Raises AgreementError if it could not be sent."""
    device = _device(group)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=source)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(buffer, group=group, group_src=source)
    return decode(_content(buffer), source)


def encode(value: Any) -> bytes:
    """Return the bytes of a value, or of the reason why it can't be sent, since other ranks wait for
    it.
    """
    try:
        return _SENT + codec.dumps(value)
    except codec.CodecError as error:
        found = str(error)
    except Exception as error:  # of the value's own methods, or of torch
        found = f"a value that raised {type(error).__name__}: {error}"
    return _FAILED + found.encode(errors="replace")


def decode(data: bytes, source: int) -> Any:
    """Return the value that rank `source` has encoded. Raises AgreementError if there is none."""
    if data[:1] == _FAILED:
        raise AgreementError(
            given=f"a value that rank {source} sends to other ranks",
            found=f"it contains {data[1:].decode(errors='replace')}, which needs pickle",
            fix=f"send its parts, of these types: {codec.SENDABLE}",
        )
    try:
        return codec.loads(data[1:])
    except codec.CodecError as error:
        raise AgreementError(
            given=f"a value that rank {source} sent",
            found=str(error),
            fix="import the module of its class on all ranks; if it has no class, another process "
            "wrote into this run: see SECURITY.md, Other users of the machine",
        ) from None


class _Parts:
    """The bytes of all ranks, in tensors of one size."""

    def __init__(self, mine: torch.Tensor, sizes: list[int]) -> None:
        self.mine = mine
        self.sizes = sizes

    def read(self, received: list[torch.Tensor]) -> list[Any]:
        """Return the values in tensors that were received from all ranks, or [] for none."""
        return [
            decode(_content(buffer[:size]), rank)
            for rank, (buffer, size) in enumerate(zip(received, self.sizes, strict=False))
        ]


def _padded(data: bytes, group: dist.ProcessGroup) -> _Parts:
    device = _device(group)
    found = gather_numbers(len(data), group)
    return _Parts(_bytes(data + b"\0" * (max(found) - len(data)), device), found)


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of this group's messages: the CPU if the group supports it."""
    kinds = device_types(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _bytes(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _content(buffer: torch.Tensor) -> bytes:
    return buffer.cpu().numpy().tobytes()
