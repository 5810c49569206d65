"""The end of a rank's process groups: destroyed at a clean end, aborted after a failure.

NCCL's destroy waits for the collectives that this rank has begun. If a rank fails, the others may never
join these, and a rank that waited for them could not report its error. So no rank waits without a
limit, and its error comes first.
"""

from __future__ import annotations

import atexit
import faulthandler
import signal
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist

from shoal._torch import c10d
from shoal.distributed.failure import exit_status
from shoal.distributed.watchdog import abort
from shoal.telemetry.flight_recorder import recording_groups
from shoal.util.clock import CLOCK, start_work

GIVE_UP_SECONDS = 10.0
"""Seconds after which a process ends without its groups."""
REPORT_SECONDS = 1.0
"""Seconds for which an error waits for the groups before it is raised further, and reported."""
LET_GO_SECONDS = 0.05
"""Seconds for which a rank that has left its groups lets their threads finish."""


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that `error` ends; 0 for a clean end."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return exit_status(error)[0]
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def leave_groups(
    error: BaseException | None, *, exiting: bool, kept: Collection[dist.ProcessGroup] = ()
) -> None:
    """Leave all process groups but `kept`, because of `error` if it is not a clean end.

    If the groups do not end in time, the process continues, and ends without them when Python exits,
    which `exiting` says it does.
    """
    code = exit_code(error)
    end = partial(c10d.end_process_groups, kept, abort=bool(code))
    if any(recording_groups()):  # through MPI, all calls are those of one thread
        c10d.end_process_groups(kept, abort=False)
    elif exiting:
        # Python 3.12 starts no thread when it exits, but this one of C ends the process.
        faulthandler.dump_traceback_later(GIVE_UP_SECONDS, exit=True, file=2)
        end()
        faulthandler.cancel_dump_traceback_later()
    else:
        until = CLOCK.now() + GIVE_UP_SECONDS
        ending = start_work(end)
        if not _ended(ending, REPORT_SECONDS if code else GIVE_UP_SECONDS):
            atexit.register(_end_process, ending, until, code)
            return
        if not code:
            ending.result()
    # A model that outlives the world keeps Gloo's threads. One of them may still have to release the
    # last collective's tensors. It needs the interpreter for that, and would abort the process if the
    # interpreter had begun to exit.
    CLOCK.sleep(LET_GO_SECONDS)


def _ended(ending: Future[None], within: float) -> bool:
    try:
        ending.exception(within)
    except TimeoutError:
        return False
    return True


def _end_process(ending: Future[None], until: float, code: int) -> None:
    """End the process, whose errors have been reported, if its groups have not ended by then."""
    if not _ended(ending, max(0.0, until - CLOCK.now())):
        abort.exit_process((), code)
