"""One outcome on all ranks: a failure on one of them is the same CheckpointError on every one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.checkpoint.object_store import RemoteError
from shoal.checkpoint.store import DamageError
from shoal.util.errors import CheckpointError, ShoalError

if TYPE_CHECKING:
    import torch.distributed as dist

    from shoal.distributed.membership import Survivors

T = TypeVar("T")

_FIXES = {
    errno.ENOSPC: "free space there (df -h shows it), or keep fewer checkpoints",
    errno.EDQUOT: "free space there (quota shows your limit), or keep fewer checkpoints",
    errno.EACCES: "make the directory writable for you (ls -ld shows its owner), or choose another",
    errno.EPERM: "make the directory writable for you (ls -ld shows its owner), or choose another",
    errno.EROFS: "choose a directory on a file system that is not mounted read-only",
    errno.ENOTDIR: "choose a directory that is not below a file (ls -ld shows which it is)",
    errno.EISDIR: "move what has this name away (ls -ld shows it), or choose another directory",
    errno.ELOOP: "look where it leads (ls -l shows it) and remove it, or choose another directory",
    errno.EEXIST: "move what has this name away (ls -ld shows it), or choose another directory",
}


class Ranks(Protocol):
    """What checkpoints need of a World; `group` is None in a world of one."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all of them."""

    @property
    def survivors(self) -> Survivors | None:
        """Those that live, where others may have ended; None where none may."""

    def gather(self, value: Any, /) -> list[Any]:
        """Each rank's value, on all ranks."""

    def broadcast(self, value: Any, /) -> Any:
        """Rank 0's value, on all ranks."""


class Agreement:
    """Runs what may fail on single ranks. `given` begins the error: what was asked for."""

    def __init__(self, world: Ranks) -> None:
        self._world = world

    def attempt(self, given: str, action: Callable[[], T]) -> T | CheckpointError:
        """What `action` returns on this rank, or its failure; never raises."""
        try:
            return action()
        except Exception as error:
            return _explain(error, given, self._world.rank)

    def together(self, given: str, action: Callable[[], T]) -> T:
        """Run `action` on each rank and return its result, unless it failed on any; collective."""
        outcome = self.attempt(given, action)
        mine = None
        if isinstance(outcome, CheckpointError):
            mine = (outcome.given, outcome.found, outcome.fix)
        failures = [failure for failure in self._world.gather(mine) if failure is not None]
        if failures or isinstance(outcome, CheckpointError):
            given, found, fix = failures[0]
            raise CheckpointError(given=given, found=_count(found, failures), fix=fix)
        return outcome


def first_failure(outcomes: list[Any]) -> CheckpointError | None:
    """The first failure among outcomes of all ranks, saying how many there are."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, CheckpointError)]
    if not failures:
        return None
    first = failures[0]
    return CheckpointError(given=first.given, found=_count(first.found, failures), fix=first.fix)


def _count(found: str, failures: list[Any]) -> str:
    others = len(failures) - 1
    return f"{found} (and {others} more ranks failed)" if others else found


def _explain(error: BaseException, given: str, rank: int) -> CheckpointError:
    if isinstance(error, ShoalError):
        return CheckpointError(given=error.given, found=f"rank {rank}: {error.found}", fix=error.fix)
    if isinstance(error, RemoteError):
        fix = "see whether fsspec reaches it with your login and may write there; then the same again"
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    if isinstance(error, OSError):
        fix = _FIXES.get(error.errno or 0, "see whether the file system of this path is in order")
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    if isinstance(error, DamageError):
        fix = "remove this checkpoint to go on from the one before it, or use the Shoal that wrote it"
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    return CheckpointError(
        given=given,
        found=f"rank {rank}: {type(error).__name__}: {error}",
        fix="if this is not your own code's error, report it together with this text",
    )
