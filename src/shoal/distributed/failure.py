"""Failures of ranks: each rank records its own, `culprit` picks the cause, and it is reported once."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import TracebackType

from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.passing_faults import chain, passing_cause
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.user_frames import is_library, own_traceback


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one rank.

    `code` is the exit code in a shell (128 + signal for a killed rank), `signal` is 0 for ranks that
    exited by themselves. `when` is in seconds of `time.monotonic`, a clock that all processes of a
    machine share. `step` is the number of optimizer steps that the open Run had taken. `text` is a
    traceback or the message of `sys.exit`, without the place. `by_peer` is set if the error looks like
    a consequence of another rank's death, and `hung` if ranks waited for this one in a hang. `passing`
    is the fault that caused the error and may pass, such as EIO.
    """

    rank: int
    code: int
    when: float
    where: str
    signal: int = 0
    text: str = ""
    by_peer: bool = False
    hung: bool = False
    step: int | None = None
    passing: str = ""

    @property
    def signature(self) -> str:
        """The rank, the line and the step of an exception that would come again; empty if they are
        unknown, or if another rank's death or a fault that may pass is the cause.
        """
        _, _, place = self.where.partition(", ")
        if self.step is None or self.doubtful or self.passing or not place:
            return ""
        return f"rank {self.rank}, {place}, after step {self.step}"

    @property
    def killed(self) -> bool:
        """Whether another process killed it; libraries abort themselves after errors of other ranks."""
        return self.signal not in (0, signal.SIGABRT)

    @property
    def doubtful(self) -> bool:
        """Whether another rank's death may be the cause, which is not known yet."""
        return self.by_peer or self.signal == signal.SIGABRT


@dataclass(frozen=True, kw_only=True)
class DepartedRank:
    """A rank that left the others without a failure.

    Its script has `ended`, or it has closed its world and its script continues. `when` is as in a
    Failure; `where` is the host and, if known, the place in the user's code. If `announced`, the rank
    itself reported the time; otherwise it is the time at which the launcher found that the process had
    ended.
    """

    rank: int
    when: float
    where: str
    ended: bool
    announced: bool = True


_STEP = "_shoal_step"
"""The attribute of an exception for the number of optimizer steps of the run that it ends."""


def encode(failure: Failure) -> bytes:
    """Return a failure as JSON, to send it from a rank to its launcher."""
    return json.dumps(asdict(failure)).encode()


def decode(data: bytes) -> Failure:
    """Return the failure that `encode` wrote."""
    return Failure(**json.loads(data))


def culprit(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others, of at least one.

    A killed rank comes before all errors, since the others may have noticed its death and recorded
    their errors before the launcher did. Then come the ranks' own errors, then ranks that left to be
    restarted, then errors that look like the death of a peer. Among equals, the earliest comes first.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.killed:
            return 0, failure.when
        if failure.by_peer:
            return 3, failure.when
        return 2 if failure.code == REQUEUE else 1, failure.when

    return min(failures, key=order)


def first_to_leave(failures: Sequence[Failure], left: Sequence[DepartedRank]) -> DepartedRank | None:
    """Return the rank that left first, if that explains failures that all look like another rank's
    death.

    It does not explain the failure of a rank that has left the others too, and no longer needs them.
    """
    gone = {one.rank for one in left}
    failed = {failure.rank for failure in failures}
    needing = [failure.when for failure in failures if failure.rank not in gone]
    if not needing or not all(failure.doubtful for failure in failures):
        return None
    before = [one for one in left if one.rank not in failed]
    before = [one for one in before if not one.announced or one.when <= min(needing)]
    return min(before, key=lambda one: one.when, default=None)


def explain(failures: Sequence[Failure], left: Sequence[DepartedRank], *, size: int) -> Failure:
    """Return the failure to report, of at least one: that of the rank which caused the others.

    It may be a rank that left with exit code 0 while others still needed it. The text of its report
    begins with the failure that it caused.
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
        found=f"rank {cause.rank} still needed it, on {cause.where}: {shorten(reason(cause), 150)}",
        fix=SAME_STEPS,
    )
    text = f"{_text(cause)}\n{str(error).lstrip()}"
    return replace(
        cause, rank=first.rank, where=first.where, text=text, signal=0, code=1, by_peer=False
    )


def preempted(failures: Sequence[Failure]) -> bool:
    """Return whether the ranks have not failed, but left after a signal, to be restarted."""
    return bool(failures) and all(failure.code == REQUEUE for failure in failures)


def report(failure: Failure, *, size: int) -> str:
    """Return a failure as text for the terminal: the traceback or the reason, then the place."""
    text = f"rank {failure.rank} was {_text(failure)}" if failure.signal else _text(failure)
    after = "" if failure.step is None else f", after step {failure.step}"
    after += f"; {failure.passing} may pass" if failure.passing else ""
    where = f"where: rank {failure.rank} of {size} on {failure.where}{after}"
    others = size - 1
    if others:
        where += f" (the other {others} were stopped)" if others > 1 else " (the other was stopped)"
    return f"{text}\n{where}\n"


def loss(failure: Failure, *, size: int) -> str:
    """Return one line about the end of a rank without which the others continue."""
    return f"shoal run: rank {failure.rank} of {size}: {reason(failure)}; the others continue\n"


def reason(failure: Failure) -> str:
    """Return a failure in one line: the exception, the `found` of a ShoalError, or the signal."""
    found = [line for line in _text(failure).splitlines()[-3:] if line.startswith("found: ")]
    return found[0].removeprefix("found: ") if found else _last_line(failure)


def _last_line(failure: Failure) -> str:
    return _text(failure).splitlines()[-1]


def _text(failure: Failure) -> str:
    if failure.signal:
        text = f"killed by {_signal_name(failure.signal)}"
        if failure.signal == signal.SIGKILL:
            text += ", often because the system ran out of memory"
        return text
    again = ", to be restarted" if failure.code == REQUEUE else ""
    return failure.text.rstrip("\n") or f"ended with exit code {failure.code}{again}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def from_exit(*, rank: int, host: str, pid: int, exitcode: int, when: float) -> Failure:
    """Return the failure of a rank of which only the exit code is known (negative: the signal that
    killed it).
    """
    signum = max(0, -exitcode)
    code = 128 + signum if signum else exitcode
    return Failure(rank=rank, code=code, when=when, where=f"{host}, pid {pid}", signal=signum)


def from_exception(error: BaseException, *, rank: int, host: str, when: float) -> Failure:
    """Return the failure of a rank that an exception ended."""
    place = locate(error)
    where = host if place is None else f"{host}, {place}"
    if isinstance(error, SystemExit):
        code, text = exit_status(error)
        return Failure(rank=rank, code=code, when=when, where=where, text=text)
    return Failure(
        rank=rank,
        code=1,
        when=when,
        where=where,
        text=_spell(error),
        by_peer=is_by_peer(error),
        step=getattr(error, _STEP, None),
        passing=passing_cause(error),
    )


def note_step(error: BaseException, step: int) -> None:
    """Keep in an exception the number of optimizer steps of the run that it ends."""
    setattr(error, _STEP, step)


def exit_status(error: SystemExit) -> tuple[int, str]:
    """Return the exit code and the message of a `sys.exit`, as Python computes them."""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return 1, str(error.code)


def _spell(error: BaseException) -> str:
    """Return the traceback from the user's script on; of a ShoalError, only the lines of user code."""
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
    """Return the innermost `file:line` of user code in a traceback, or None."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(_skip_launcher(error))
    own = [frame for frame in frames if not is_library(frame.filename)]
    # The line in Shoal that detected a user's mistake does not help to find it.
    chosen = own or ([] if isinstance(error, ShoalError) else list(frames))
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else None


_ROOM = 17


def report_into(folder: Path, *, rank: int, size: int) -> None:
    """Write a report into a directory if an exception ends this process.

    Files sort by relevance: a rank's own errors come before those that look like the death of a peer,
    and the earliest come first.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A rank takes a while to exit, and the others notice its end: its file must sort first.
        with suppress(OSError):
            now = CLOCK.wall()
            found = from_exception(error, rank=rank, host=socket.gethostname(), when=now)
            if not isinstance(error, KeyboardInterrupt):
                name = f"{int(found.by_peer)}-{now:0{_ROOM}.6f}-{rank}"
                (folder / name).write_text(report(found, size=size))
        before(kind, error, trace)

    sys.excepthook = hook


# The errors of ranks whose peer has died (Gloo, NCCL, TCPStore), and of ranks to which it sent
# its own error.
_BY_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|communicator was aborted|failed to recv|peer closed"
    r"|see (that rank|rank 0)'s own error",
    re.IGNORECASE,
)

SAME_STEPS = (
    "let all ranks take the same number of steps: no sys.exit, os._exit, break or return that only "
    "some of them reach"
)
"""The fix if a rank leaves while others still need it."""


def is_by_peer(error: BaseException) -> bool:
    """Return whether an error, or its cause, looks like the result of another rank's death.

    The system's own errors do not: torch has others for its connections.
    """
    for seen in chain(error):
        with suppress(Exception):  # `str(error)` itself may raise
            if not isinstance(seen, OSError) and _BY_PEER.search(str(seen)):
                return True
    return False
