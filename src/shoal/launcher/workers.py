"""The processes of one attempt on this machine: started, watched until the first failure, ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import LEFT, MAY_DIE
from shoal.distributed.env_vars import safe_path
from shoal.distributed.failure import (
    DepartedRank,
    Failure,
    decode,
    first_to_leave,
    from_exit,
    preempted,
)
from shoal.launcher.entry_point import EntryPoint
from shoal.launcher.signals import FORWARDED
from shoal.launcher.worker_main import RETURNED, SHIELDED, main
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

GRACE = 3.0
"""Seconds between asking ranks to end and killing them, if no Run is open."""

SAVING_GRACE = 600.0
"""The same if a Run is open, which saves."""

_PRELOAD = ["torch", "torch.distributed", "shoal.launcher.worker_main", "shoal.launcher.elastic_agent"]

# Ranks notice a peer's death within 50 ms, and their reports may arrive before its exit status.
_SETTLE = 0.2

_UNEXPLAINED = 3.0
"""The same while all errors look like the death of a peer: on a busy machine its end may be noticed
seconds after theirs.
"""


def start_server(imports: Sequence[str] = ()) -> None:
    """Start the fork server, the only process of a run that imports torch, and these modules.

    It does nothing if there is one.
    """
    multiprocessing.set_forkserver_preload([*_PRELOAD, *imports])
    # Schedulers signal every process of a job, and the parent of the ranks must not die before they
    # save. It inherits the mask; ranks remove it when they are ready, and lose no signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        with safe_path():
            # Start it separately first, since it unblocks signals when it has started.
            resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
        with safe_path():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """The ranks of this machine in one attempt.

    `variables` has one environment per process, each with its RANK, `logs` the files for their output,
    if any. `lost` is called for each rank without which the others continue.
    """

    def __init__(
        self,
        job: EntryPoint,
        variables: Sequence[Mapping[str, str]],
        logs: Sequence[str] | None,
        lost: Callable[[Failure], object],
    ) -> None:
        files = [None] * len(variables) if logs is None else logs
        self._waiting = [_Rank(job, *each) for each in zip(variables, files, strict=True)]
        self._ranks: list[_Rank] = []
        self._lost = lost
        self.over: tuple[bytes, ...] | None = None
        """The results of the ranks, if `stop` has found that all of them ended well."""

    def start(self) -> list[int]:
        """Start all processes and return their ids."""
        pids: list[int] = []
        for rank in self._waiting:
            try:
                pids.append(rank.start())
            except (EOFError, OSError) as error:
                raise LaunchError(
                    given=f"process {len(pids) + 1} of {len(self._waiting)}",
                    found=f"it could not be forked ({error})",
                    fix="try `python -c 'import torch.distributed'`, and `ulimit -u` (processes)",
                ) from None
            self._ranks.append(rank)
        return pids

    def wait(self, grace: float | None, limit: float | None = None) -> list[Failure] | None:
        """Wait until all have ended well (return the empty list) or one has failed.

        After the first failure, there is a short wait for failures of others. When a rank has left to
        be restarted, the others have `grace` seconds to do the same. Return None if neither has
        happened after `limit` seconds, if that is given.
        """
        deadline: float | None = None
        until = None if limit is None else CLOCK.now() + limit
        first: float | None = None
        while True:
            self._spare()
            failures = [rank.failure for rank in self._ranks if rank.failure is not None]
            if any(failure.killed for failure in failures):
                return failures
            if failures and not preempted(failures):
                first = CLOCK.now() if first is None else first
                explained = not all(failure.doubtful for failure in failures)
                explained = explained or first_to_leave(failures, self.left()) is not None
                deadline = first + (_SETTLE if explained else _UNEXPLAINED)
            elif failures and deadline is None:
                deadline = CLOCK.now() + (SAVING_GRACE if grace is None else grace)
            running = [rank for rank in self._ranks if not rank.ended]
            if not running or (deadline is not None and CLOCK.now() >= deadline):
                return failures
            if until is not None and first is None and CLOCK.now() >= until:
                return None
            _poll(running, until if first is None and until is not None else deadline)

    def _spare(self) -> None:
        """Forget killed ranks that may die alone, while there are others."""
        for rank in self._ranks:
            failure = rank.failure
            others = any(not other.ended for other in self._ranks)
            if failure is not None and failure.killed and rank.may_die and others:
                rank.failure = None
                self._lost(failure)

    def left(self) -> list[DepartedRank]:
        """Return the ranks that have left the others without a failure."""
        return [rank.left for rank in self._ranks if rank.left is not None]

    def values(self) -> list[bytes]:
        """Return the results of ranks that have ended, in rank order; empty for none."""
        return [rank.value for rank in self._ranks]

    def send(self, signum: int) -> bool:
        """Signal the ranks that have not ended; return whether there are any."""
        running = [rank for rank in self._ranks if not rank.ended]
        for rank in running:
            rank.send(signum)
        return bool(running)

    def stop(self, signum: int, grace: float | None) -> bool:
        """Send `signum`, and after `grace` seconds SIGKILL to the remaining processes.

        The default of `grace` depends on the ranks: GRACE, or SAVING_GRACE. Return whether ranks left
        in that time to be restarted. An exception in the wait, such as a second Ctrl-C, ends it and
        still kills.
        """
        try:
            running = [rank for rank in self._ranks if not rank.ended]
            if grace is None:
                grace = SAVING_GRACE if any(rank.saves() for rank in running) else GRACE
            self.send(signum)
            self.send(signal.SIGCONT)  # a stopped process could not end
            deadline = CLOCK.now() + grace
            while running and CLOCK.now() < deadline:
                _poll(running, deadline)
                running = [rank for rank in running if not rank.ended]
            failures = [rank.failure for rank in self._ranks if rank.failure is not None]
            if self._ranks and all(rank.ended_well for rank in self._ranks):
                self.over = tuple(self.values())
            return preempted(failures) and not running
        finally:
            for rank in self._ranks:
                rank.kill()
            for rank in self._ranks:
                rank.join()
            # The kernel may reuse their ids from here on.
            self._ranks = []


class _Rank:
    """One process, and the known facts about its end."""

    def __init__(self, job: EntryPoint, variables: Mapping[str, str], log: str | None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.rank = int(variables["RANK"])
        self.ended = False
        self.failure: Failure | None = None
        self.may_die = False
        self.left: DepartedRank | None = None
        self.finished = False
        self.value = b""
        self._reports, self._sender = context.Pipe(duplex=False)
        args = (job, self.rank, variables, self._sender, log)
        self._process = context.Process(target=main, args=args)

    def start(self) -> int:
        with without_main():
            self._process.start()
        self._sender.close()
        return self._id()

    def _id(self) -> int:
        if self._process.pid is None:
            raise RuntimeError("the process has not been started")
        return self._process.pid

    def handles(self) -> list[connection.Connection | int]:
        """Return the objects to wait for."""
        reports = [] if self._reports.closed else [self._reports]
        return [*reports, self._process.sentinel]

    def poll(self) -> None:
        """Read a value, a failure or an end."""
        # First, since a rank that has ended has sent its messages.
        exitcode = self._process.exitcode
        with suppress(EOFError, OSError):
            while not self._reports.closed and self._reports.poll():
                self._read()
        if exitcode is None or self.ended:
            return
        self.ended = True
        host, now = socket.gethostname(), CLOCK.now()
        if exitcode and self.failure is None:
            self.failure = from_exit(
                rank=self.rank, host=host, pid=self._id(), exitcode=exitcode, when=now
            )
        elif not exitcode:
            silent = DepartedRank(
                rank=self.rank, when=now, where=f"{host}, pid {self._id()}", ended=True, announced=False
            )
            self.left = silent if self.left is None else replace(self.left, ended=True)

    def _read(self) -> None:
        last = True
        try:
            report = self._reports.recv_bytes()
            last = report != MAY_DIE and not report.startswith(LEFT)
            if last:
                self._take(report)
            elif report == MAY_DIE:
                self.may_die = True
            else:
                self._note_left(json.loads(report.removeprefix(LEFT)))
        finally:
            # One more report at most; afterwards only the end matters.
            if last:
                self._reports.close()

    def _note_left(self, notice: Mapping[str, Any] | None) -> None:
        self.finished = notice is not None and notice.get("finished", False)
        if notice is None:
            self.left = None
        elif self.left is None:
            where = ", ".join(filter(None, (socket.gethostname(), notice["place"])))
            self.left = DepartedRank(
                rank=self.rank, when=notice["when"], where=where, ended=notice["ended"]
            )
        else:  # it closed its world before, and its script has ended now
            self.left = replace(self.left, ended=notice["ended"])

    def _take(self, report: bytes) -> None:
        if report == RETURNED:
            # It may be hundreds of megabytes, which the rank writes while they are read here.
            self.value = self._reports.recv_bytes()
        else:
            self.failure = decode(report)

    @property
    def ended_well(self) -> bool:
        """Return whether its script reached its end, and its process ended without an error."""
        return self.ended and self.finished and self.failure is None

    def saves(self) -> bool:
        """Return whether the worker has an open Run, which handles all of FORWARDED."""
        wanted = sum(1 << (signum - 1) for signum in FORWARDED)
        with suppress(OSError):
            for line in Path(f"/proc/{self._id()}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return int(line.split()[1], 16) & wanted == wanted
        return False

    def send(self, signum: int) -> None:
        """Signal only the process itself, and not its children."""
        with suppress(ProcessLookupError):
            os.kill(self._id(), signum)

    def kill(self) -> None:
        """Kill the process and all processes that it started and left."""
        try:
            os.killpg(self._id(), signal.SIGKILL)
        except ProcessLookupError:
            # It has not created its group yet, or all of the group has ended.
            if self._process.exitcode is None:
                self.send(signal.SIGKILL)

    def join(self) -> None:
        self._process.join()
        self.ended = True


def _poll(ranks: Sequence[_Rank], deadline: float | None) -> None:
    left = None if deadline is None else max(0.0, deadline - CLOCK.now())
    handles = [handle for rank in ranks for handle in rank.handles()]
    if connection.wait(handles, left):
        for rank in ranks:
            rank.poll()


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the launcher's own `__main__`, which new processes would otherwise import first."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
