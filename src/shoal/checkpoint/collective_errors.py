"""One outcome on all ranks: an error on one of them is the same CheckpointError on all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.checkpoint.object_store import RemoteError
from shoal.checkpoint.store import DamageError
from shoal.distributed.passing_faults import note_cause, passing_cause
from shoal.util.errors import CheckpointError, LaunchError, ShoalError

if TYPE_CHECKING:
    import torch.distributed as dist

    from shoal.distributed.membership import Membership

T = TypeVar("T")

_FIXES = {
    errno.ENOSPC: "free space there (df -h shows it), or keep fewer checkpoints",
    errno.EDQUOT: "free space there (quota shows your limit), or keep fewer checkpoints",
    errno.EACCES: "make the directory writable for you (ls -ld shows its owner), or choose another",
    errno.EPERM: "make the directory writable for you (ls -ld shows its owner), or choose another",
    errno.EROFS: "choose a directory on a file system that is not mounted read-only",
    errno.ENOTDIR: "choose a directory that is not below a file (ls -ld shows the file)",
    errno.EISDIR: "rename the directory of this name (ls -ld shows it), or choose another directory",
    errno.ELOOP: "remove the symbolic link (ls -l shows its target), or choose another directory",
    errno.EEXIST: "rename the file of this name (ls -ld shows it), or choose another directory",
}


class Ranks(Protocol):
    """The part of World that checkpoints use; `group` is None in a world of size 1."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks."""

    @property
    def membership(self) -> Membership:
        """The ranks that take part."""

    def gather(self, value: Any, /) -> list[Any]:
        """Return each rank's value, on all ranks."""

    def broadcast(self, value: Any, /) -> Any:
        """Return rank 0's value, on all ranks."""


class Agreement:
    """Makes an error on one rank the same CheckpointError on all ranks of a world."""

    def __init__(self, world: Ranks) -> None:
        self._world = world

    def together(self, given: str, action: Callable[[], T]) -> T:
        """Run `action` on each rank and return its result; raise an error if it failed on any rank.

        `given` is the first line of the error: the user's request. Collective.
        """
        outcome = outcome_of(action)
        failures = self._world.gather(_failure(outcome, given, self._world.rank))
        failure = _combined(failures)
        if failure is not None:
            raise failure
        return outcome.result()


class Channel(Protocol):
    """Messages between ranks that do not mix with the collectives of training."""

    def collect(self, value: Any) -> list[Any]:
        """Return each rank's value on rank 0, and an empty list elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""


class RankZeroAgreement:
    """Makes the result or the error of rank 0 the outcome of all ranks.

    `given` is the first line of the errors: the user's request.
    """

    def __init__(self, channel: Channel, rank: int, given: str) -> None:
        self._channel = channel
        self._rank = rank
        self._given = given

    def decide(self, action: Callable[[], T]) -> T:
        """Run `action` on each rank; return rank 0's result or raise its error on all. Collective."""
        outcome = outcome_of(action)
        with explained(self._given, self._rank):
            value, failure = self._channel.broadcast(self._message(outcome))
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    def collect(self, outcome: Future[T]) -> list[T]:
        """Return the results of all ranks on rank 0, and an empty list on the others. Collective.

        Raises an error on rank 0 if any rank failed. Call it in actions of `decide`, which raises that
        error on all ranks.
        """
        messages = self._channel.collect(self._message(outcome))
        failure = _combined([failure for _, failure in messages])
        if failure is not None:
            raise _RankFailureError(failure)
        return [value for value, _ in messages]

    def _message(self, outcome: Future[T]) -> tuple[T | None, CheckpointError | None]:
        failure = _failure(outcome, self._given, self._rank)
        return (outcome.result() if failure is None else None), failure


@contextmanager
def explained(given: str, rank: int) -> Iterator[None]:
    """Raise an error of this block as a CheckpointError that names the rank."""
    try:
        yield
    except Exception as error:
        raise _explained_error(error, given, rank) from None


def outcome_of(action: Callable[[], T]) -> Future[T]:
    """Run `action` now; return a future with its result or its error."""
    outcome: Future[T] = Future()
    try:
        outcome.set_result(action())
    except Exception as error:
        # The traceback would keep the tensors of this call alive.
        outcome.set_exception(error.with_traceback(None))
    return outcome


class _RankFailureError(Exception):
    """Carries an error that already contains its rank."""

    def __init__(self, failure: CheckpointError) -> None:
        super().__init__(failure)
        self.failure = failure


def _failure(outcome: Future[Any], given: str, rank: int) -> CheckpointError | None:
    error = outcome.exception()
    return None if error is None else _explained_error(error, given, rank)


def _combined(failures: list[CheckpointError | None]) -> CheckpointError | None:
    """Return the failure of the first rank that has one, with the number of the others in its text."""
    found = [failure for failure in failures if failure is not None]
    if not found:
        return None
    others = len(found) - 1
    text = f"{found[0].found} (and {others} more ranks failed)" if others else found[0].found
    error = CheckpointError(given=found[0].given, found=text, fix=found[0].fix)
    return note_cause(error, next(filter(None, map(passing_cause, found)), ""))


def _explained_error(error: BaseException, given: str, rank: int) -> CheckpointError:
    return note_cause(_explain(error, given, rank), passing_cause(error))


def _explain(error: BaseException, given: str, rank: int) -> CheckpointError:
    if isinstance(error, _RankFailureError):
        return error.failure
    if isinstance(error, LaunchError):  # it names the rank that has ended
        return CheckpointError(**error.texts)
    if isinstance(error, ShoalError):
        return CheckpointError(given=error.given, found=f"rank {rank}: {error.found}", fix=error.fix)
    if isinstance(error, RemoteError):
        fix = "check that fsspec can write there with your credentials, then try again"
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    if isinstance(error, OSError):
        fix = _FIXES.get(error.errno or 0, "check the file system of this path (df -h, mount)")
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    if isinstance(error, DamageError):
        fix = "remove this checkpoint to resume from the previous one, or use the Shoal that wrote it"
        return CheckpointError(given=given, found=f"rank {rank}: {error}", fix=fix)
    return CheckpointError(
        given=given,
        found=f"rank {rank}: {type(error).__name__}: {error}",
        fix="if the error is not in your own code, report it with this message",
    )
