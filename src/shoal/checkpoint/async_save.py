"""Work that goes on while training does: one job at a time, and what its ranks tell each other."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from shoal.checkpoint.collective_errors import Ranks
from shoal.checkpoint.staging import Staging
from shoal.distributed import objects
from shoal.distributed.membership import LOOK_SECONDS, Survivors
from shoal.distributed.watchdog.mismatch import ASIDE
from shoal.util.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.checkpoint.tensors import Plan

T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""How long a rank that has written its part waits for the others."""
_PAUSE = 0.02


class BackgroundSave(Generic[T]):
    """Something under way on a thread of its own."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.seconds = 0.0
        """How long it took, once it is over."""
        self._outcome: T | BaseException
        # Whoever needs it waits for it; a rank that fails must be able to end without.
        self._thread = threading.Thread(target=self._run, args=(action,), name=ASIDE, daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], T]) -> None:
        begun = time.perf_counter()
        try:
            self._outcome = action()
        except BaseException as error:
            self._outcome = error
        self.seconds = time.perf_counter() - begun

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it is over and `wait` raises."""
        return self.done and isinstance(self._outcome, BaseException)

    def join(self, within: float | None = None) -> None:
        """Until it has ended, however it did; no longer than `within` seconds."""
        self._thread.join(within)

    def wait(self) -> T:
        """What it came to; raises what it raised."""
        self.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Mail:
    """What ranks tell each other through their store, where any of them may end at any moment.

    A collective of Gloo's would keep those waiting that don't talk to the one that has ended. `name` is
    its own in the store, where what another has told stays.
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
        """Whether those that live are still the same."""
        return self.members == self._survivors.members

    def collect(self, value: Any) -> list[Any]:
        """As `Aside.collect`; CheckpointError where one has ended."""
        self._number += 1
        if self._rank != self.members[0]:
            self._store.set(self._key(self._rank), objects.encode(value))
            return []
        return [value, *(self._take(member, last=True) for member in self.members[1:])]

    def tell(self, value: Any) -> Any:
        """As `Aside.tell`."""
        self._number += 1
        if self._rank != self.members[0]:
            return self._take(self.members[0], last=False)
        self._store.set(self._key(self._rank), objects.encode(value))
        return value

    def _take(self, member: int, *, last: bool) -> Any:
        """What a member has put there, once it has; gone with the `last` that reads it."""
        key = self._key(member)
        looked = time.monotonic()
        while not self._store.check([key]):
            time.sleep(_PAUSE)
            if time.monotonic() < looked + LOOK_SECONDS:
                continue
            looked = time.monotonic()
            if self._gone([member]) and not self._store.check([key]):
                raise CheckpointError(
                    given="a checkpoint under way",
                    found=f"rank {member} has ended, and its part is missing",
                    fix="nothing: the next one is saved without it",
                )
        found = objects.decode(self._store.get(key), member)
        if last:
            self._store.delete_key(key)
        return found

    def _key(self, member: int) -> str:
        return f"{self._prefix}/{self._number}/{member}"


class Aside:
    """Where jobs run, with a buffer to take state over into and a process group of their own.

    On the group of training, collectives of a job would meet those of a step.
    """

    def __init__(self, world: Ranks) -> None:
        self.staging = Staging()
        self.plan: Plan | None = None
        """Who writes what, of the save before."""
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._mail: Mail | None = None
        self._job: BackgroundSave[Any] | None = None

    def prepare(self) -> None:
        """Make the group, once, or what stands for it where ranks may end. Collective."""
        if self._world.group is None:
            return
        survivors = self._world.survivors
        if survivors is not None:
            if self._mail is None or not self.fits:
                name = self._mail.name if self._mail else self._world.broadcast(secrets.token_hex(8))
                self._mail, self.plan = Mail(survivors, name), None
        elif self._group is None:
            ranks = dist.get_process_group_ranks(self._world.group)
            self._group = dist.new_group(ranks, timeout=PATIENCE, backend="gloo")

    @property
    def fits(self) -> bool:
        """Whether the ranks are still those for which it was prepared."""
        return self._mail is None or self._mail.fits

    def start(self, action: Callable[[], T]) -> BackgroundSave[T]:
        """Run `action` on a thread; it may call `collect` and `tell`. The job before must be over."""
        self._job = job = BackgroundSave(action)
        return job

    def wait(self) -> None:
        """Until the job that is under way, if any, has ended, however it did."""
        if self._job is not None:
            self._job.join()

    def collect(self, value: Any) -> list[Any]:
        """Everyone's value on rank 0, nothing elsewhere. Collective, from a job."""
        if self._mail is not None:
            return self._mail.collect(value)
        if self._group is None:
            return [value]
        return objects.collect(value, self._group)

    def tell(self, value: Any) -> Any:
        """Rank 0's value on every rank. Collective, from a job."""
        if self._mail is not None:
            return self._mail.tell(value)
        if self._group is None:
            return value
        return objects.broadcast(value, self._group)
