"""The thread of each rank that detects a hang, finds the rank that caused it, and ends all ranks.

A rank hangs if no process group has begun a new operation for as long as a wait may last, no call has
been answered, and its main thread is inside a collective, or inside torch.distributed sending or
receiving. So the training itself needs no counters, and long operations that make no other rank wait
are not hangs.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from shoal.distributed import objects
from shoal.distributed.failure import SAME_STEPS, Failure, is_by_peer
from shoal.distributed.rendezvous import listen
from shoal.distributed.watchdog import abort, diagnosis, side_channel, stacks
from shoal.distributed.watchdog.diagnosis import HangDiagnosis, RankReport, SilentRank, WaitLimits
from shoal.distributed.watchdog.side_channel import PeerAddress, UnreachableError
from shoal.telemetry import flight_recorder
from shoal.telemetry.flight_recorder import Collective
from shoal.util.clock import CLOCK, Clock, local_time
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.regular_file import write_new

_INTERVAL = 0.5
"""Longest time in seconds between two checks."""
_ANSWER_SECONDS = 2.0
_LATER_SECONDS, _LATEST_RANK = 0.05, 20
"""Each rank up to `_LATEST_RANK` begins to ask this much later than the rank before it, so that few of
thousands of waiting ranks ask all the others. A rank that a lower one has asked leaves the decision to
it.
"""
_LEFT_SECONDS = 2 * _ANSWER_SECONDS
_AGAIN_SECONDS = 1.0
_LONGEST_LOOK = _INTERVAL + _ANSWER_SECONDS + _AGAIN_SECONDS
"""Longest time in seconds between two checks while this process runs."""
_GONE_SECONDS = 1.0
"""Seconds for which a rank whose connection broke asks which rank has ended: the sockets of one process
close one after the other.
"""
_NEIGHBOUR_SECONDS = 5.0
"""Seconds after which a rank asks whether the next one is still alive, and then again."""
_TOGETHER_SECONDS = 0.25
"""Seconds for which all ranks wait before they end, or the first to end would look like the cause."""
_WRITE_SECONDS = 1.0
_RECENT = 20
_LONGEST_STACKS = 1 << 16


class Watch:
    """A thread that watches the waits of this rank, and answers questions of other ranks.

    `limit` is the number of seconds that a wait may last now; it begins with that of preparation.
    `directory` returns where a report is written, or None for the temporary directory.
    `checked` returns the collective that waits for a check, if any. Others reach this rank at
    `address`. The constructor is collective, and its thread is the one that trains: in Ray Train it is
    not Python's main thread.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        limits: WaitLimits,
        address: str,
        directory: Callable[[], Path | None],
        checked: Callable[[], Collective | None],
        clock: Clock = CLOCK,
    ) -> None:
        self._clock = clock
        self._main = threading.current_thread()
        self.limit = limits.prepare
        self._limits = limits
        self._directory = directory
        self._checked = checked
        self._rank, self._size = group.rank(), group.size()
        self._socket = listen(0, address)
        mine = PeerAddress(
            host=socket.gethostname(),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
            address=address,
            port=self._socket.getsockname()[1],
        )
        everyone = objects.gather((mine, secrets.token_hex(16)), group)
        self._peers: list[PeerAddress] = [peer for peer, _ in everyone]
        self._token: str = everyone[0][1]
        self._before = flight_recorder.newest_records()
        self._answers = 0
        self._left = -math.inf
        self._decided = False
        self._first_gone: list[int] = []
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="shoal watch", daemon=True)
        self._thread.start()
        abort.tell_joined()

    def leave(self) -> None:
        """Stop, and report why this rank leaves if another's death or its own choice is the reason."""
        abort.tell_left()
        error = getattr(sys, "last_value", None)  # when Python exits, its traceback has been printed
        named = None if error is None or sys.exception() else self.explain_end(error)
        if named is not None:
            abort.say(f"{named.found}: {named.fix}")
        self.stop()

    def explain_end(self, error: BaseException) -> LaunchError | None:
        """Do what `explain` does for an error that ends this rank, if no launcher knows more."""
        if abort.launched() and len({peer.host for peer in self._peers}) == 1:
            return None
        return None if isinstance(error, ShoalError) else self.explain(error)

    def stop(self) -> None:
        """End the thread and close the socket, by which other ranks detect that this one has left."""
        if self._thread.is_alive():  # not in a fork of this process
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()
        self._socket.close()

    def gone(self, ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
        """Return those of the ranks that have ended or left the world, without the silent ones.

        With `unreachable`, ranks whose machines do not reply are included.
        """
        try:
            asked = asyncio.run_coroutine_threadsafe(self._ask(ranks, {"alive": True}), self._loop)
        except RuntimeError:  # this rank has left the world
            return set()
        signs = (ConnectionError, UnreachableError) if unreachable else ConnectionError
        answers = zip(ranks, asked.result(), strict=True)
        return {rank for rank, answer in answers if isinstance(answer, signs)}

    def explain(self, error: BaseException, during: str = "") -> LaunchError | None:
        """Return an error that names the rank that has left, if `error` looks like another rank's
        death; None if it is not known. This rank was in `during` (default: its last collective).

        A rank that asks notifies the others of the answer, since ranks that fail for the same reason
        end soon.
        """
        if not is_by_peer(error):
            return None
        others = [rank for rank in range(self._size) if rank != self._rank]
        pause = _LATER_SECONDS * min(self._rank, _LATEST_RANK)
        until = self._clock.now() + pause + _GONE_SECONDS
        while not self._first_gone and self._clock.now() < until:
            self._clock.sleep(pause)
            pause = _LATER_SECONDS
            self._first_gone = self._first_gone or sorted(self.gone(others))
        if not self._first_gone:
            return None
        with suppress(RuntimeError):  # this rank has left the world
            told = self._ask(others, {"gone": self._first_gone})
            asyncio.run_coroutine_threadsafe(told, self._loop).result()
        absent = [self._understand(rank, ConnectionError()) for rank in self._first_gone]
        if not during:
            place = stacks.own_line([*stacks.thread_stack(self._main), *stacks.traced(error)])
            calls = flight_recorder.recorded_collectives(self._before)
            during = f"{calls[-1]} at {place}" if calls else str(place)
        left = [one for one in absent if isinstance(one, SilentRank)]
        return diagnosis.has_left(left, self._size, self._rank, during)

    def answered(self) -> None:
        """Note that another rank has answered, outside of all process groups; from any thread."""
        self._answers += 1  # threads may lose an increment, but a change is enough

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._watch())

    async def _watch(self) -> None:
        door = side_channel.SideChannelServer(self._token, self._reply)
        server = await asyncio.start_server(door.answer, sock=self._socket, limit=side_channel.LONGEST)
        async with server:
            try:
                await self._look_on()
            finally:
                door.close()  # closing a server waits for its connections

    async def _look_on(self) -> None:
        later = _LATER_SECONDS * min(self._rank, _LATEST_RANK)
        counts, waited, asked, looked = self._counts(), 0.0, 0.0, self._clock.now()
        while not await _within(self._stopped.wait(), min(_INTERVAL, self.limit / 10)):
            # Time in which this process was stopped, or its machine asleep, does not count.
            passed = min(self._clock.now() - looked, _LONGEST_LOOK, self.limit / 2)
            looked = self._clock.now()
            now = self._counts()
            waited, counts = waited + passed if now == counts else 0.0, now
            asked = min(asked, waited)
            if waited >= self.limit + later and self._still_waits(counts):
                await self._judge(waited)
                await _within(self._stopped.wait(), _AGAIN_SECONDS)
            elif waited >= asked + _NEIGHBOUR_SECONDS:
                asked = waited
                if await self._neighbour_is_gone():
                    await self._judge(waited)

    async def _neighbour_is_gone(self) -> bool:
        """Return whether this rank waits, and the next one in the group of its collective has left its
        world.

        Each member asks one, so that a group of thousands detects ranks that left with few messages.
        """
        waits = self._waits(stacks.thread_stack(self._main))
        members = [] if waits is None else flight_recorder.group_ranks().get(waits.group, [])
        if self._rank not in members or len(members) == 1:
            return False
        following = members[(members.index(self._rank) + 1) % len(members)]
        (answer,) = await self._ask([following], {"alive": True})
        return isinstance(answer, ConnectionError)

    def _still_waits(self, counts: tuple[int, ...]) -> bool:
        """Return whether this rank waits in an operation that it began before it had these counts."""
        return self._waits(stacks.thread_stack(self._main)) is not None and self._counts() == counts

    def _counts(self) -> tuple[int, ...]:
        return (self._answers, *flight_recorder.operation_counts())

    async def _judge(self, seconds: float) -> None:
        """Ask all ranks, decide, and end all if the diagnosis applies; the lowest rank that asks
        decides.
        """
        if self._clock.now() < self._left + _LEFT_SECONDS:
            return
        counts = self._counts()
        answers = await self._ask(range(self._size), {"judge": self._rank})
        found = [self._understand(rank, answer) for rank, answer in enumerate(answers)]
        decided = diagnosis.decide(found, seconds=seconds)
        if decided is None:  # the wait has ended while the others were asked
            return
        if seconds < decided.due(self._limits, self.limit):
            return
        if self._ending is not None or not self._still_waits(counts):
            return  # a rank that answered after the wait had ended looks as if it had not arrived
        report = self._put_into_words(decided, found)
        self._decided = True
        there = [one.rank for one in found if isinstance(one, RankReport) and one.rank != self._rank]
        silent = [one.rank for one in found if isinstance(one, SilentRank) and not one.ended]
        ends = await self._ask(there, {"judge": self._rank, "end": asdict(report), "silent": silent})
        if self._ending is not None or {"refused": True} in ends:
            self._decided = False
            return
        if not abort.tell_launcher(report):
            abort.tell_people(report, self._size)
        await self._end(silent)

    async def _ask(
        self, ranks: Sequence[int], question: dict[str, Any]
    ) -> list[dict[str, Any] | OSError]:
        """Return the answer of each of the ranks, or its error."""

        async def ask(rank: int) -> dict[str, Any] | OSError:
            asked = side_channel.ask(self._peers[rank], self._token, question)
            try:
                return await asyncio.wait_for(asked, _ANSWER_SECONDS)
            except OSError as error:  # includes TimeoutError
                return error
            except ValueError as error:  # incomplete JSON
                return ConnectionResetError(str(error))

        return await asyncio.gather(*map(ask, ranks))

    def _understand(self, rank: int, answer: dict[str, Any] | OSError) -> RankReport | SilentRank:
        if isinstance(answer, dict):
            return diagnosis.from_plain(answer)
        peer = self._peers[rank]
        ended = isinstance(answer, ConnectionError)
        cut = isinstance(answer, UnreachableError)
        return SilentRank(rank=rank, host=peer.host, pid=peer.pid, ended=ended, cut=cut)

    def _reply(self, question: dict[str, Any]) -> dict[str, Any]:
        if "alive" in question:
            return {}
        if "gone" in question:
            self._first_gone = self._first_gone or question["gone"]
            return {}
        lower = question["judge"] < self._rank
        if "end" not in question:
            self._left = self._clock.now() if lower else self._left
            return diagnosis.to_plain(self._see())
        if self._decided and not lower:
            return {"refused": True}
        abort.tell_launcher(Failure(**question["end"]))
        self._ending = asyncio.create_task(self._end(question["silent"]))
        return {}

    async def _end(self, silent: Sequence[int]) -> None:
        await asyncio.sleep(_TOGETHER_SECONDS)
        host = self._peers[self._rank].host
        here = [peer for rank in silent if (peer := self._peers[rank]).host == host]
        # `shoal run` ends the remaining ranks, and would take a killed one for the cause.
        abort.exit_process([] if abort.launched() else [(peer.pid, peer.born) for peer in here])

    def _see(self) -> RankReport:
        lines = stacks.thread_stack(self._main)
        own = stacks.own_line(lines)
        return RankReport(
            rank=self._rank,
            host=self._peers[self._rank].host,
            place=str(own),
            function=own.function,
            waits=self._waits(lines),
            busy=stacks.busy(lines),
            limit=self.limit,
            recent=tuple(flight_recorder.recorded_collectives(self._before)[-_RECENT:]),
            groups=flight_recorder.group_ranks(),
            stacks=stacks.all_stacks(self._main)[:_LONGEST_STACKS],
        )

    def _waits(self, lines: Sequence[stacks.StackLine]) -> Collective | None:
        """Return what this rank waits in. Its background threads do not count."""
        recorded = self._checked() or flight_recorder.oldest_outstanding(
            self._before, stacks.background_threads(self._main)
        )
        called = stacks.communication(lines)
        if recorded is not None or not called:
            return recorded
        return Collective(group="", number=0, operation=called, tensors="", done=False)

    def _put_into_words(
        self, decided: HangDiagnosis, found: Sequence[RankReport | SilentRank]
    ) -> Failure:
        kept = self._keep(f"{decided.line}\n\n{diagnosis.details(found)}")
        name = "timeout" if self.limit == self._limits.step else "prepare_timeout"
        longer = f"shoal.init({name}=…)"
        if name == "timeout":
            longer = f"`with world.preparing():` around it on all ranks, or {longer}"
        given = f"a wait of more than {self.limit:g} s, the {name} of shoal.init"
        fix = f"if one rank may take that long: {longer}"
        if decided.patience == -math.inf:
            given = "a wait for a rank that has left"
            fix = f"if that rank has no error: {SAME_STEPS}"
        error = ShoalError(
            given=given, found=decided.line, fix=f"see {kept}, the stacks of all ranks; {fix}"
        )
        return Failure(
            rank=decided.rank,
            code=abort.EXIT_CODE,
            hung=True,
            where=decided.where,
            text=f"{diagnosis.table(found)}{str(error).lstrip()}",
            when=self._clock.now(),
        )

    def _keep(self, text: str) -> Path:
        """Write the details to a file and return its path, without waiting for a hanging disk."""
        # In the temporary directory, another user could create a file at a guessable name.
        unique = f"{os.getpid()}-{secrets.token_hex(8)}"
        name = f"hang-{local_time(self._clock.wall(), '%Y%m%d-%H%M%S')}-{unique}.txt"
        path = (self._directory() or Path(tempfile.gettempdir())) / name
        abort.within(_WRITE_SECONDS, lambda: write_new(path, text, private=True))
        return path


async def _within(what: Awaitable[object], seconds: float) -> bool:
    """Return whether `what` completes within this many seconds."""
    try:
        await asyncio.wait_for(what, seconds)
    except TimeoutError:
        return False
    return True
