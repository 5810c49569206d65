"""Builds a snapshot of a run from its events, with its latest checkpoint and the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from shoal.tools.report import (
    Array,
    Attempt,
    BottleneckReport,
    Event,
    History,
    Reader,
    find_bottleneck,
    profile,
)
from shoal.tools.report.attempts import outcome_of, silence_limit
from shoal.tools.report.dashboard.curves import Tracks
from shoal.tools.report.dashboard.snapshot import (
    OVER,
    CheckpointStatus,
    RankStats,
    Restarts,
    RunProgress,
    RunStatus,
    Slowest,
    Snapshot,
)
from shoal.tools.report.history import integer_in, number_in, text_in
from shoal.util.clock import CLOCK, local_time
from shoal.util.errors import CheckpointError

KEEP = 512
"""Number of newest steps of each rank that are judged; at most twice this number is held."""
LATELY = 30.0
"""Seconds over which the bars are averaged, but at least FEW steps."""
FEW = 20
MISSING = 64
"""Maximum number of silent ranks that are listed."""
REST = 20.0
LONG = 0.03
"""A verdict that takes longer, in seconds, is repeated only after REST times its duration."""


class SnapshotBuilder:
    """A reader that returns a snapshot at each look; with `wait` the run may not exist yet.

    It never writes into the run directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        wait: bool = True,
        now: Callable[[], float] = CLOCK.wall,
        rest: float = REST,
    ) -> None:
        self._directory = directory
        self._wait = wait
        self._now = now
        self._rest = rest
        self._verdict: BottleneckReport | None = None
        self._judge_at = 0.0
        self._reader: Reader | None = None
        self._tracks = Tracks()
        self._leader: int | None = None
        self._origin: dict[float, int] = {}
        self._taken: dict[float, int] = {}
        self._since: dict[tuple[int, str], int] = {}
        self._grown = 0.0
        self._looked = False

    def look(self) -> Snapshot:
        """Read new events, and return the state of the run.

        Raises CheckpointError if there is no run, and none is waited for.
        """
        if self._reader is None:
            try:
                self._reader = Reader(self._directory, keep=KEEP, seen=self._see)
            except CheckpointError as error:
                if not self._wait or self._directory.is_file():
                    raise
                hint = f"; {error.fix}" if self._directory.exists() else ""
                return self._snapshot(RunStatus(kind="absent", reason=error.found + hint))
        if self._reader.poll() and self._looked:
            self._grown = self._now()
        self._looked = True
        history = self._reader.history
        attempt = history.latest
        if attempt is None:
            return self._snapshot(RunStatus(kind="starting"))
        for before in history.attempts[:-1]:
            for rows in (*before.steps.values(), *before.usage.values()):
                rows.shorten(1)
        return self._of(history, attempt)

    def _see(self, attempt: Attempt, rank: int, name: str, rows: Array) -> None:
        """Add steps of the lowest rank to the curves; of several Steps only the counting one."""
        if self._leader is None or rank < self._leader:
            self._leader, self._tracks, self._taken = rank, Tracks(), {}
        if rank == self._leader:
            steps = rows[rows["wall"] > 0]
            if name == attempt.counting:  # other Steps may be taken less often
                self._tracks.add(steps["step"], steps["loss"], steps["size"], steps["wall"])
            taken = self._taken.get(attempt.began, 0) + int(steps["size"].sum(dtype=np.int64))
            self._taken = {attempt.began: taken}

    def _of(self, history: History, attempt: Attempt) -> Snapshot:
        now = self._now()
        leader = attempt.ticks(min(attempt.ranks, default=0))[-KEEP:]
        walls = leader["wall"].astype(float)
        heard = max(min(attempt.seen, now), self._grown)
        state = _over(attempt, now) or _alive(now - heard, walls)
        if not len(walls):
            ranks = tuple(_rank(attempt, rank, {}) for rank in attempt.ranks)
            return self._snapshot(state, history, ranks=ranks)
        verdict = self._judge(history)
        self._origin = {attempt.began: max(self._origin.get(attempt.began, 0), _begun_at(attempt))}
        position = self._origin[attempt.began] + self._taken.get(attempt.began, 0)
        window = _window(walls)
        return replace(
            self._snapshot(state, history, ranks=_ranks(attempt, window)),
            verdict=verdict.sentence,
            progress=_progress(attempt, leader, position, until=heard if state.kind in OVER else now),
            loss=self._tracks.loss(_newest(leader["loss"])),
            throughput=self._tracks.throughput(_rate(leader[-window:])),
            window=window,
            slowest=self._slowest(verdict),
            saves=checkpoint_status(
                history, attempt, step=attempt.last, seconds=float(walls.mean()), now=now
            ),
        )

    def _judge(self, history: History) -> BottleneckReport:
        """Return the verdict; the previous one if judging takes long and it is recent."""
        begun = CLOCK.now()
        if self._verdict is None or begun >= self._judge_at:
            self._verdict = find_bottleneck(history, last=KEEP)
            took = CLOCK.now() - begun
            self._judge_at = begun + took + (self._rest * took if took > LONG else 0.0)
        return self._verdict

    def _slowest(self, verdict: BottleneckReport) -> Slowest | None:
        """Return the rank that causes most of the loss and is still slow."""
        slow = [each for each in verdict.stragglers if each.until is None]
        since = {}
        for each in slow:
            # The held steps may begin after the rank became slow; an earlier look has seen the start.
            known = each.since > int(verdict.judged[-1].profile.first[0])
            before = self._since.get((each.rank, each.part))
            if known or before is not None:
                since[each.rank, each.part] = each.since if before is None else before
        self._since = since
        if not slow:
            return None
        first = slow[0]
        return Slowest(
            rank=first.rank,
            host=first.host or "",
            part=first.part,
            excess=first.excess,
            since=since.get((first.rank, first.part)),
        )

    def _snapshot(
        self, state: RunStatus, history: History | None = None, ranks: tuple[RankStats, ...] = ()
    ) -> Snapshot:
        attempt = history.latest if history is not None else None
        return Snapshot(
            run=str(self._directory),
            clock=local_time(self._now(), "%H:%M:%S"),
            state=state,
            size=attempt.size if attempt is not None else 0,
            ranks=ranks,
            missing=tuple(attempt.missing[:MISSING]) if attempt is not None else (),
            device_memory=attempt is not None and any(_on_device(attempt, r.number) for r in ranks),
            restarts=_restarts(history) if history is not None else Restarts(),
        )


def _alive(silence: float, walls: Array) -> RunStatus:
    """Return the status of a run that has not recorded its end."""
    if not len(walls):
        return RunStatus(kind="starting", since=silence)
    silent = silence > silence_limit(walls)
    return RunStatus(kind="silent" if silent else "running", since=silence)


def _over(attempt: Attempt, now: float) -> RunStatus | None:
    """Return how an attempt ended; None if no event records an end."""
    found = outcome_of(attempt)
    if found is None:
        return None
    since = max(0.0, now - found.time) if found.time is not None else 0.0
    return RunStatus(kind=found.kind, since=since, reason=found.reason(attempt))


def _restarts(history: History) -> Restarts:
    """Return the number of restarts, and the reason for the last."""
    if len(history.attempts) < 2:
        return Restarts()
    before = history.attempts[-2]
    found = outcome_of(before)
    if found is None:
        last = f"the previous attempt fell silent after step {before.last:,}, as if killed"
    else:
        asked = found.kind in ("preempted", "interrupted")
        last = f"the previous attempt {'was ' * asked}{found.kind}"
        reason = found.reason(before)
        last += f": {reason}" if reason else ""
    return Restarts(count=len(history.attempts) - 1, last=last)


def _window(walls: Array) -> int:
    """Return how many of the newest steps are within the last LATELY seconds; at least FEW."""
    late = int(np.searchsorted(np.cumsum(walls[::-1]), LATELY))
    return min(len(walls), max(FEW, late))


def _begun_at(attempt: Attempt) -> int:
    """Return the position of the first sample of an attempt, counted since the start of training."""
    restored = [integer_in(event, "position") or 0 for _, event in attempt.said("restore")]
    return max(restored, default=0)


def _progress(attempt: Attempt, leader: Array, position: int, *, until: float) -> RunProgress:
    start = attempt.starts.get(min(attempt.starts, default=0), {})
    goal, epoch = integer_in(start, "goal"), integer_in(start, "epoch_size")
    rate = _rate(leader)
    left = max(0, goal - position) / rate if goal is not None and rate else None
    return RunProgress(
        step=attempt.last,
        position=position,
        goal=goal,
        epoch_size=epoch,
        left=left,
        elapsed=max(0.0, until - attempt.began),
    )


def _ranks(attempt: Attempt, window: int) -> tuple[RankStats, ...]:
    found = profile(attempt, last=window, windows=1)
    means = {rank: found.of_rank(rank) for rank in found.ranks} if found is not None else {}
    return tuple(_rank(attempt, rank, means.get(rank, {})) for rank in attempt.ranks)


def _rank(attempt: Attempt, rank: int, parts: Mapping[str, float]) -> RankStats:
    column = "device_memory" if _on_device(attempt, rank) else "rss"
    used = _usage(attempt, rank, column)
    return RankStats(number=rank, host=attempt.host(rank) or "", parts=parts, memory=used)


def _usage(attempt: Attempt, rank: int, column: str) -> int | None:
    rows = attempt.usage.get(rank)
    value = float(rows.all[column][-1]) if rows is not None and len(rows) else math.nan
    return int(value) if 0 < value < 1e18 else None


def _on_device(attempt: Attempt, rank: int) -> bool:
    return _usage(attempt, rank, "device_memory") is not None


def _newest(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _rate(steps: Array) -> float | None:
    """Return samples per second of all ranks together."""
    seconds = float(steps["wall"].sum(dtype=float))
    return float(steps["size"].sum(dtype=float)) / seconds if seconds > 0 else None


def checkpoint_status(
    history: History, attempt: Attempt, *, step: int, seconds: float, now: float
) -> CheckpointStatus:
    """Return the last save of all attempts, and the next, estimated from this attempt's saves.

    `step` is the current step and `seconds` the time of one. If the saves were the same number of steps
    apart, the next is expected after the same number; otherwise after the time between the last two.
    """
    told = [found for each in history.attempts for found in _saves(each)]
    last_step, last_time, took, blocked = told[-1] if told else (None, now, 0.0, 0.0)
    next_step, due = _next(attempt, step, seconds, now)
    return CheckpointStatus(
        step=last_step,
        ago=max(0.0, now - last_time),
        seconds=took,
        blocked=blocked,
        next_step=next_step,
        due=due,
        failed=_failed(attempt, after=last_time if told else 0.0),
    )


SaveRecord = tuple[int, float, float, float]
"""The step, the time of completion, the seconds that the save took, and those that it blocked."""


def _saves(attempt: Attempt) -> list[SaveRecord]:
    """Return the saves as recorded by one rank, the lowest that recorded any."""
    told = attempt.said("save")
    teller = min((rank for rank, _ in told), default=0)
    found = []
    for rank, event in told:
        step, time = integer_in(event, "step"), number_in(event, "t")
        if rank == teller and step is not None and time is not None and _is_regular(event):
            took, blocked = number_in(event, "seconds") or 0.0, number_in(event, "blocked") or 0.0
            found.append((step, time, took, blocked))
    return found


def _is_regular(event: Event) -> bool:
    """Return whether the run would resume from it, unlike from a checkpoint in `best/` and the like."""
    folders = text_in(event, "path").split("/")
    return len(folders) < 2 or folders[-2] == "checkpoints"


def _next(attempt: Attempt, step: int, seconds: float, now: float) -> tuple[int | None, float | None]:
    """Return the step of the next save, and the seconds until then."""
    found = _saves(attempt)
    steps = [save[0] for save in found]
    if attempt.first <= 1:
        steps.insert(0, 0)  # the very first save defines the distance
    spans = [after - before for before, after in pairwise(steps)][-2:]
    if not spans or not found:
        return None, None
    if spans[0] == spans[-1] > 0:
        at = steps[-1] + spans[-1]
        return at, (at - step) * seconds
    if len(found) < 2:
        return None, None
    return None, found[-1][1] + (found[-1][1] - found[-2][1]) - now


def _failed(attempt: Attempt, *, after: float) -> str:
    """Return the error of the last save, if it failed."""
    for _, event in reversed(attempt.said("save_failed")):
        time, step = number_in(event, "t"), integer_in(event, "step")
        if time is not None and time > after:
            return f"at step {step:,}: {text_in(event, 'error')}" if step is not None else "once"
    return ""
