"""Background saves: the thread of one save, the messages between its ranks, its copy of tensors."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.collective_errors import Ranks
from shoal.checkpoint.state_tree import safetensors_header
from shoal.distributed import objects
from shoal.distributed.membership import LOOK_SECONDS, Survivors
from shoal.distributed.watchdog.mismatch import BACKGROUND_SAVE
from shoal.util.accelerator import is_accelerator, pinned, record
from shoal.util.clock import CLOCK
from shoal.util.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.checkpoint.tensors import WritePlan

T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""The time that a rank which has written its part waits for the others."""
_PAUSE = 0.02
_HERE = "the save of a checkpoint"
BLOCK = 16 << 20
"""Bytes that are hashed and written at a time."""


class BackgroundSave(Generic[T]):
    """A save that runs on its own thread."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.seconds = 0.0
        """The duration, once it has ended."""
        self._outcome: T | BaseException
        # A daemon thread, so that a rank that fails can end while its save is running.
        self._thread = threading.Thread(
            target=self._run, args=(action,), name=BACKGROUND_SAVE, daemon=True
        )
        self._thread.start()

    def _run(self, action: Callable[[], T]) -> None:
        begun = CLOCK.now()
        try:
            self._outcome = action()
        except BaseException as error:
            self._outcome = error
        self.seconds = CLOCK.now() - begun

    @property
    def done(self) -> bool:
        """True if `wait` returns at once."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if the save has ended and `wait` raises its error."""
        return self.done and isinstance(self._outcome, BaseException)

    def join(self, within: float | None = None) -> None:
        """Wait until the save has ended, with or without an error, for at most `within` seconds."""
        self._thread.join(within)

    def wait(self) -> T:
        """Wait for the save; return its result or raise its error."""
        self.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class StoreChannel:
    """A channel through the ranks' store, for ranks of which any may end at any moment.

    In a Gloo collective, ranks that exchange no data with the rank that has ended would wait until the
    timeout. `name` must be unique in the store, which keeps the messages of earlier channels.
    """

    def __init__(self, survivors: Survivors, name: str) -> None:
        self.name = name
        self._survivors = survivors
        self.members = list(survivors.members)
        self._rank = survivors.rank
        self._gone = survivors.gone
        self._store: Any = survivors.store
        self._prefix = "-".join(["saves", name, *map(str, self.members)])
        self._number = 0

    @property
    def fits(self) -> bool:
        """True if the members are still the running ranks."""
        return self.members == self._survivors.members

    def collect(self, value: Any) -> list[Any]:
        """See Channel. Raise CheckpointError if a member has ended."""
        self._number += 1
        if self._rank != self.members[0]:
            self._store.set(self._key(self._rank), objects.encode(value))
            return []
        return [value, *(self._take(member, last=True) for member in self.members[1:])]

    def broadcast(self, value: Any) -> Any:
        """See Channel. Raise CheckpointError if rank 0 has ended."""
        self._number += 1
        if self._rank != self.members[0]:
            return self._take(self.members[0], last=False)
        self._store.set(self._key(self._rank), objects.encode(value))
        return value

    def _take(self, member: int, *, last: bool) -> Any:
        """Wait for the message of a member and return it; the `last` reader deletes it."""
        key = self._key(member)
        looked = CLOCK.now()
        while not self._store.check([key]):
            CLOCK.sleep(_PAUSE)
            if CLOCK.now() < looked + LOOK_SECONDS:
                continue
            looked = CLOCK.now()
            if self._gone([member]) and not self._store.check([key]):
                raise CheckpointError(
                    given="a checkpoint that is being saved",
                    found=f"rank {member} has ended, and its part is missing",
                    fix="do nothing: the other ranks save the next checkpoint",
                )
        found = objects.decode(self._store.get(key), member)
        if last:
            self._store.delete_key(key)
        return found

    def _key(self, member: int) -> str:
        return f"{self._prefix}/{self._number}/{member}"


class Staging:
    """A copy of tensors in one reused buffer of host memory, laid out as a safetensors file.

    The writer of the safetensors library makes additional copies, and can neither hash nor sync the
    data that it writes.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._header = b""
        self._bytes = 0
        self._copied: list[Any] = []
        """Events after which the copies from devices are complete."""

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self._header) + self._bytes

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`; when this returns, they may change. No thread may read `blocks` until then.

        The host does not wait for devices: a change comes after the copy on the same stream.
        """
        real = {name: _as_real(tensor) for name, tensor in tensors.items()}
        self._bytes = end = sum(tensor.nbytes for tensor in real.values())
        self._header, places = safetensors_header(
            {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in real.items()}
        )
        devices = {tensor.device for tensor in real.values() if is_accelerator(tensor.device)}
        if self._buffer.numel() < end or (devices and not self._pinned):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._pinned = bool(devices)
            first = next(iter(devices), None)
            self._buffer = pinned(end, first) if first else torch.empty(end, dtype=torch.uint8)
        for name, place in places.items():
            tensor = real[name]
            target = self._buffer[place].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        self._copied = [event for device in devices if (event := record(device)) is not None]

    def blocks(self) -> list[bytes | memoryview]:
        """Return the content of the file, in order. Wait for the copies from devices."""
        for event in self._copied:
            event.synchronize()
        data = self._buffer.numpy().data
        starts = range(0, self._bytes, BLOCK)
        return [self._header, *(data[start : min(start + BLOCK, self._bytes)] for start in starts)]


class BackgroundSaver:
    """Runs one save at a time on a thread; keeps the channel, the buffer and the plan for later saves.

    The channel is a separate process group: on the group of training, the collectives of a save would
    mix with those of a step.
    """

    def __init__(self, world: Ranks) -> None:
        self.staging = Staging()
        self.plan: WritePlan | None = None
        """The tensors that each rank writes, from the previous save."""
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._messages: StoreChannel | None = None
        self._save: BackgroundSave[Any] | None = None

    def prepare(self) -> None:
        """Create the channel: a process group, or a StoreChannel if ranks may end. Collective."""
        if self._world.group is None:
            return
        survivors = self._world.membership.survivors
        if survivors is not None:
            if self._messages is None or not self.fits:
                last = self._messages
                name = last.name if last else self._world.broadcast(secrets.token_hex(8))
                self._messages, self.plan = StoreChannel(survivors, name), None
        elif self._group is None:
            ranks = dist.get_process_group_ranks(self._world.group)
            self._group = dist.new_group(ranks, timeout=PATIENCE, backend="gloo")

    @property
    def fits(self) -> bool:
        """True if the members of the channel are still the running ranks."""
        return self._messages is None or self._messages.fits

    def start(self, action: Callable[[], T]) -> BackgroundSave[T]:
        """Run `action`, which may use the channel, on a thread. The previous save must have ended."""
        self._save = save = BackgroundSave(action)
        return save

    def wait(self) -> None:
        """Wait until the running save, if any, has ended, with or without an error."""
        if self._save is not None:
            self._save.join()

    def collect(self, value: Any) -> list[Any]:
        """See Channel."""
        if self._messages is not None:
            return self._messages.collect(value)
        if self._group is None:
            return [value]
        with self._world.membership.explained(_HERE):
            return objects.collect(value, self._group)

    def broadcast(self, value: Any) -> Any:
        """See Channel."""
        if self._messages is not None:
            return self._messages.broadcast(value)
        if self._group is None:
            return value
        with self._world.membership.explained(_HERE):
            return objects.broadcast(value, self._group)


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
