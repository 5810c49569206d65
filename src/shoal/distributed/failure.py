"""The first failure of a run: recorded by the rank that fails, decided purely, reported once."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import TracebackType

from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.watchdog.peer_errors import SAME_STEPS, is_by_peer
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.user_code import is_library, own_traceback


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    `code` is what a shell shows (128 + signal for a killed rank), `signal` is 0 for ranks that
    ended by themselves. `when` is in seconds of `time.monotonic`, which all processes of a machine
    share. `text` is a traceback or the message of `sys.exit`, without the place; `by_peer` says
    that the error reads as the consequence of another rank's death, `hung` that ranks waited for
    this one without end.
    """

    rank: int
    code: int
    when: float
    where: str
    signal: int = 0
    text: str = ""
    by_peer: bool = False
    hung: bool = False

    @property
    def killed(self) -> bool:
        """Whether it was killed from outside; libraries abort themselves over others' errors."""
        return self.signal not in (0, signal.SIGABRT)

    @property
    def doubtful(self) -> bool:
        """Whether another rank's death may be what is behind it, which has to show yet."""
        return self.by_peer or self.signal == signal.SIGABRT


@dataclass(frozen=True, kw_only=True)
class Left:
    """A rank that left the others without a failure.

    Its script has `ended`, or it has closed its world and its script continues. `when` is as in a
    Failure, `where` the host and, where it is known, the place in the user's code. `announced` says
    that the rank itself told the moment; that of others is when their process was found to have ended.
    """

    rank: int
    when: float
    where: str
    ended: bool
    announced: bool = True


def encode(failure: Failure) -> bytes:
    """Write a failure as JSON, to cross from a rank to its launcher."""
    return json.dumps(asdict(failure)).encode()


def decode(data: bytes) -> Failure:
    """Read what `encode` wrote."""
    return Failure(**json.loads(data))


def culprit(failures: Sequence[Failure]) -> Failure:
    """Decide which of the failures (at least one) caused the others.

    A rank killed from outside beats all errors, since the others may have noticed its death and
    recorded theirs before the launcher did. Then come the ranks' own errors, before ranks that left
    to be started again, and those whose error reads as the death of a peer; among equals the earliest.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.killed:
            return 0, failure.when
        if failure.by_peer:
            return 3, failure.when
        return 2 if failure.code == REQUEUE else 1, failure.when

    return min(failures, key=order)


def first_to_leave(failures: Sequence[Failure], left: Sequence[Left]) -> Left | None:
    """The rank that left first, if that explains failures which all read as another rank's death.

    It explains no failure of a rank that has left the others too, and needs them no more.
    """
    gone = {one.rank for one in left}
    failed = {failure.rank for failure in failures}
    needing = [failure.when for failure in failures if failure.rank not in gone]
    if not needing or not all(failure.doubtful for failure in failures):
        return None
    before = [one for one in left if one.rank not in failed]
    before = [one for one in before if not one.announced or one.when <= min(needing)]
    return min(before, key=lambda one: one.when, default=None)


def explain(failures: Sequence[Failure], left: Sequence[Left], *, size: int) -> Failure:
    """The failure to report of those of a run (at least one): that of the rank which caused the others.

    That may be a rank that left with exit code 0 while the others still needed it. The text of its
    report begins with the failure that it caused.
    """
    cause = culprit(failures)
    if cause.hung:
        where = next((one.where for one in left if one.rank == cause.rank), cause.where)
        return replace(cause, where=where)
    first = first_to_leave(failures, left)
    if first is None:
        return cause
    did = "ended with exit code 0" if first.ended else "left its world"
    error = LaunchError(
        given=f"rank {first.rank} of {size}, which {did} on {first.where}",
        found=f"rank {cause.rank} still needed it, on {cause.where}: {shorten(_last_line(cause), 150)}",
        fix=SAME_STEPS,
    )
    text = f"{_text(cause)}\n{str(error).lstrip()}"
    return replace(
        cause, rank=first.rank, where=first.where, text=text, signal=0, code=1, by_peer=False
    )


def preempted(failures: Sequence[Failure]) -> bool:
    """Whether ranks have not failed, but left because they were told to, to be started again."""
    return bool(failures) and all(failure.code == REQUEUE for failure in failures)


def report(failure: Failure, *, size: int) -> str:
    """Spell a failure for the screen: the traceback or the reason, then the place."""
    text = _text(failure)
    where = f"where: rank {failure.rank} of {size} on {failure.where}"
    others = size - 1
    if others:
        where += f" (the other {others} were stopped)" if others > 1 else " (the other was stopped)"
    return f"{text}\n{where}\n"


def loss(failure: Failure, *, size: int) -> str:
    """Spell the end of a rank without which the others go on, in one line."""
    return f"shoal run: rank {failure.rank} of {size}: {reason(failure)}; the others go on\n"


def reason(failure: Failure) -> str:
    """Spell a failure in one line: the exception, of a ShoalError what was found, or the signal."""
    found = [line for line in _text(failure).splitlines()[-3:] if line.startswith("found: ")]
    return found[0].removeprefix("found: ") if found else _last_line(failure)


def _last_line(failure: Failure) -> str:
    return _text(failure).splitlines()[-1]


def _text(failure: Failure) -> str:
    if failure.signal:
        text = f"killed by {_signal_name(failure.signal)}"
        if failure.signal == signal.SIGKILL:
            text += ", which is often the system running out of memory"
        return text
    again = ", to be started again" if failure.code == REQUEUE else ""
    return failure.text.rstrip("\n") or f"ended with exit code {failure.code}{again}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def from_exit(*, rank: int, host: str, pid: int, exitcode: int, when: float) -> Failure:
    """Describe a rank that left nothing but its exit code (negative: the signal that killed it)."""
    signum = max(0, -exitcode)
    code = 128 + signum if signum else exitcode
    return Failure(rank=rank, code=code, when=when, where=f"{host}, pid {pid}", signal=signum)


def from_exception(error: BaseException, *, rank: int, host: str, when: float) -> Failure:
    """Describe the exception that ended a rank."""
    place = locate(error)
    where = host if place is None else f"{host}, {place}"
    if isinstance(error, SystemExit):
        code, text = exit_status(error)
        return Failure(rank=rank, code=code, when=when, where=where, text=text)
    return Failure(
        rank=rank, code=1, when=when, where=where, text=_spell(error), by_peer=is_by_peer(error)
    )


def exit_status(error: SystemExit) -> tuple[int, str]:
    """The exit code and the message that Python makes of a `sys.exit`."""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return 1, str(error.code)


def _spell(error: BaseException) -> str:
    """The traceback from the user's script on; of a ShoalError only the user's own lines."""
    trace = _skip_launcher(error)
    if not isinstance(error, ShoalError):
        return "".join(traceback.format_exception(type(error), error, trace))
    own = traceback.format_tb(own_traceback(trace))
    head = ["Traceback (most recent call last):\n", *own] if own else []
    # The report ends with the place, once.
    where, error.where = error.where, None
    try:
        return "".join([*head, *traceback.format_exception_only(error)])
    finally:
        error.where = where


def _skip_launcher(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    here = str(Path(__file__).parents[1] / "launcher")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace


def locate(error: BaseException) -> str | None:
    """Name the innermost `file:line` of the user's own code in a traceback, if it has any."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(_skip_launcher(error))
    own = [frame for frame in frames if not is_library(frame.filename)]
    # Where Shoal noticed a user's mistake is no place to look for it.
    chosen = own or ([] if isinstance(error, ShoalError) else list(frames))
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else None
