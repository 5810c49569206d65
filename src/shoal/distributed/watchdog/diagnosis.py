"""Diagnosis of a hang: which rank caused it, from the reports of all ranks, and the text about it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.distributed.failure import SAME_STEPS
from shoal.telemetry.flight_recorder import Collective
from shoal.util.errors import LaunchError

CONFIRM = 1.0
"""Seconds for which what may be a matter of moments has to last before it is believed."""

BUSY_SECONDS = 300.0
"""Seconds that a rank which compiles, imports or is in a debugger has, however short the limits are."""

_ALIKE = {"all_reduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter"}
"""Collectives whose input has the same size and dtype on all ranks."""


@dataclass(frozen=True, kw_only=True)
class WaitLimits:
    """Longest waits in seconds: in a step, and during preparation."""

    step: float
    prepare: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The report of one rank about itself.

    `place` is the line of user code that its main thread is at, `function` the function of that line.
    `waits` is the collective in which it waits, if any; an operation without a group is one that torch
    does not record, such as a receive. `busy` is an activity that may take long. `limit` is how many
    seconds the others may wait for it, more until it has begun its first step. `recent` are its last
    collectives, `groups` its process groups with their ranks.
    """

    rank: int
    host: str
    place: str
    function: str
    waits: Collective | None = None
    busy: str = ""
    limit: float = 0.0
    recent: tuple[Collective, ...] = ()
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stacks: str = ""

    @property
    def partners(self) -> set[int] | None:
        """Return the ranks that it may be waiting for; None if they are not known."""
        if self.waits is None or self.waits.group not in self.groups:
            return None
        return set(self.groups[self.waits.group]) - {self.rank}


@dataclass(frozen=True, kw_only=True)
class SilentRank:
    """A rank that sent no report: its process has `ended`, or exists and does not answer, or its
    machine can't be reached (`cut`).
    """

    rank: int
    host: str
    pid: int
    ended: bool
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class HangDiagnosis:
    """The diagnosis of a hang: `line` describes it, `rank` caused it, at `where` (host and place).

    It applies if the wait has lasted `patience` seconds longer than allowed; a wait of `limit` seconds
    is always allowed. A `patience` of minus infinity means that waiting can't help.
    """

    rank: int
    where: str
    line: str
    patience: float = 0.0
    limit: float = 0.0

    def due(self, limits: WaitLimits, limit: float) -> float:
        """Return the seconds of waiting after which it applies, on a rank whose limit is `limit`."""
        longest = max(limit, self.limit)
        if self.patience == math.inf:
            return max(longest, limits.prepare, BUSY_SECONDS)
        return longest + self.patience


def to_plain(seen: RankReport) -> dict[str, Any]:
    """Return a report as JSON, to send it to other ranks."""
    return asdict(seen)


def from_plain(plain: Mapping[str, Any]) -> RankReport:
    """Return the report of which `to_plain` made JSON."""
    waits = plain["waits"]
    recent = tuple(Collective(**each) for each in plain["recent"])
    return RankReport(**{**plain, "waits": waits and Collective(**waits), "recent": recent})


def decide(found: Sequence[RankReport | SilentRank], *, seconds: float) -> HangDiagnosis | None:
    """Return the diagnosis for a wait of `seconds`, with the rank that caused it; None if no rank
    waits.

    A rank in a different collective comes first, then ranks whose process has ended, those that are
    elsewhere, and those that do not answer. If all of them wait, they wait for each other.
    """
    waiting = [one for one in found if isinstance(one, RankReport) and one.waits is not None]
    if not waiting:
        return None
    size = len(found)
    mismatch = _mismatch([one for one in found if isinstance(one, RankReport)], waiting, size)
    if mismatch is not None:
        return mismatch
    awaited = [one for one in found if _is_awaited(one, waiting)]
    ended = [one for one in awaited if isinstance(one, SilentRank) and one.ended]
    silent = [one for one in awaited if isinstance(one, SilentRank) and not one.ended]
    elsewhere = [one for one in awaited if isinstance(one, RankReport)]
    tail = _waits(waiting, seconds)
    if ended:
        line = f"{_who(ended[0], size)} has ended or left its world (its connection closed)"
        line += f"{_more(ended)}; {tail}"
        known = all(one.partners is not None for one in waiting)
        patience = -math.inf if known else 0.0
        return HangDiagnosis(rank=ended[0].rank, where=ended[0].host, line=line, patience=patience)
    if elsewhere:
        return _did_not_arrive(elsewhere, size, tail)
    cut = [one for one in silent if one.cut]
    if cut:
        return _cut_off(cut, found, tail)
    if silent:
        line = f"{_who(silent[0], size)} does not answer{_more(silent)}: process {silent[0].pid} is "
        line += f"stopped, out of memory, or in a call that holds Python's lock; {tail}"
        where = f"{silent[0].host}, pid {silent[0].pid}"
        return HangDiagnosis(rank=silent[0].rank, where=where, line=line)
    return _each_other(waiting, size, seconds)


def has_left(ranks: Sequence[SilentRank], size: int, mine: int, during: str) -> LaunchError:
    """Return an error about the `ranks` that have left, while rank `mine` was in `during`."""
    who = _who(ranks[0], size)
    line = f"{who} has ended or left its world (its connection closed){_more(ranks)}"
    return LaunchError(
        given=f"{who}, which rank {mine} needs",
        found=f"{line}, while rank {mine} was in {during}",
        fix=f"see that rank's own error; if it has none, {SAME_STEPS}",
    )


def table(found: Sequence[RankReport | SilentRank]) -> str:
    """Return where each rank is, one line per rank; of many ranks that wait in one place only the
    first.
    """
    rows = []
    met: Counter[tuple[str, str]] = Counter()
    for one in found:
        if isinstance(one, SilentRank):
            state = "gone" if one.ended else f"pid {one.pid}, no answer"
            rows.append((one.rank, one.host, "can't be reached" if one.cut else state, ""))
            continue
        doing = f"waits in {one.waits}" if one.waits is not None else one.busy or "does not wait"
        met[one.place, doing] += 1
        if met[one.place, doing] <= _ROWS:
            rows.append((one.rank, one.host, f"{one.place} in {one.function}", doing))
    width = max(len(host) for _, host, _, _ in rows)
    lines = [f"rank {r:<3} {h:<{width}}  {place}  {doing}".rstrip() for r, h, place, doing in rows]
    hidden = len(found) - len(rows)
    return "\n".join([*lines, *([f"and {hidden} more in the same places"] if hidden else [])]) + "\n"


_ROWS = 4


def details(found: Sequence[RankReport | SilentRank]) -> str:
    """Return all that the ranks reported: stacks and last collectives."""
    parts = []
    for one in found:
        parts.append(f"rank {one.rank} on {one.host}\n")
        if isinstance(one, RankReport):
            parts.append(one.stacks)
            for each in one.recent:
                state = "done" if each.done else "not done"
                parts.append(f"  group {each.group}, number {each.number}: {each}, {state}\n")
    return "".join(parts)


def _is_awaited(one: RankReport | SilentRank, waiting: Sequence[RankReport]) -> bool:
    """Return whether it does not wait, and is a partner of a rank that does, as far as known."""
    if isinstance(one, RankReport) and one.waits is not None:
        return False
    return any(each.partners is None or one.rank in each.partners for each in waiting)


def _did_not_arrive(elsewhere: Sequence[RankReport], size: int, tail: str) -> HangDiagnosis:
    # Only if all of them have a reason to take long; otherwise one without a reason is the cause.
    one = min(elsewhere, key=lambda one: (bool(one.busy), one.limit))
    others = [each for each in elsewhere if each is not one]
    doing = f", {one.busy}" if one.busy else ""
    line = f"{_who(one, size)} did not arrive: it is at {one.place} in {one.function}{doing}"
    return HangDiagnosis(
        rank=one.rank,
        where=f"{one.host}, {one.place}",
        line=f"{line}{_more([one, *others])}; {tail}",
        patience=math.inf if one.busy else 0.0,
        limit=one.limit,
    )


def _cut_off(
    cut: Sequence[SilentRank], found: Sequence[RankReport | SilentRank], tail: str
) -> HangDiagnosis:
    """Return the diagnosis if machines can't be reached from those whose ranks have answered."""
    away = list(dict.fromkeys(one.host for one in cut))
    here = list(dict.fromkeys(one.host for one in found if one.host not in away))
    line = f"{', '.join(away[:_ROWS])} can't be reached from {', '.join(here[:_ROWS])} "
    line += f"({_names([one.rank for one in cut])} of {len(found)}): "
    line += "a link is cut, or the machine is down"
    if len(here) == 1 and len(away) > 1:
        line = f"{here[0]} reaches no other machine: its own link is cut, or the links of all others"
    return HangDiagnosis(rank=cut[0].rank, where=cut[0].host, line=f"{line}; {tail}")


def _each_other(waiting: Sequence[RankReport], size: int, seconds: float) -> HangDiagnosis:
    places = Counter((one.waits, one.place) for one in waiting)
    one = min(waiting, key=lambda one: (places[one.waits, one.place], one.rank))
    where = f"{one.host}, {one.place}"
    rest = [other for other in waiting if (other.waits, other.place) != (one.waits, one.place)]
    if len(places) == 1:
        line = f"all {size} ranks have waited {seconds:.0f} s in {one.waits} at {one.place}, which "
        line += "does not end: check the network between their hosts"
    else:
        line = f"{_who(one, size)} waits in {one.waits} at {one.place}; {_waits(rest, seconds)}: "
        line += "they wait for each other"
    return HangDiagnosis(rank=one.rank, where=where, line=line, patience=CONFIRM)


def _mismatch(
    seen: Sequence[RankReport], waiting: Sequence[RankReport], size: int
) -> HangDiagnosis | None:
    """Return the diagnosis if ranks called different collectives with the same number, else None."""
    for one in waiting:
        if one.waits is None or one.waits.group not in one.groups:
            continue
        at = (one.waits.group, one.waits.number)
        theirs = {each.rank: (each, call) for each in seen if (call := _call(each, *at)) is not None}
        kinds = Counter(_kind(call) for _, call in theirs.values())
        if len(kinds) < 2:
            continue
        usual = kinds.most_common(1)[0][0]
        odd, did = next(pair for pair in theirs.values() if _kind(pair[1]) != usual)
        other, called = next(pair for pair in theirs.values() if _kind(pair[1]) == usual)
        line = f"{_who(odd, size)} called {_at(odd, did)}, where rank {other.rank} called "
        line += f"{_at(other, called)}: all ranks must call the same"
        return HangDiagnosis(rank=odd.rank, where=f"{odd.host}, {odd.place}", line=line)
    return None


def _call(one: RankReport, group: str, number: int) -> Collective | None:
    mine = [one.waits] if one.waits is not None else []
    calls = [each for each in (*mine, *one.recent) if (each.group, each.number) == (group, number)]
    return calls[0] if calls else None


def _kind(call: Collective) -> tuple[str, str]:
    return call.operation, call.tensors if call.operation in _ALIKE else ""


def _at(one: RankReport, call: Collective) -> str:
    """Return a call as text, with its place if the rank still waits in it."""
    waits = one.waits
    here = waits is not None and (waits.group, waits.number) == (call.group, call.number)
    return f"{call} at {one.place}" if here else f"{call}"


def _who(one: RankReport | SilentRank, size: int) -> str:
    return f"rank {one.rank} of {size} on {one.host}"


def _more(ranks: Sequence[RankReport | SilentRank]) -> str:
    return f" (and {_names([one.rank for one in ranks[1:]])})" if len(ranks) > 1 else ""


def _waits(waiting: Sequence[RankReport], seconds: float) -> str:
    """ "ranks 0 and 2 have waited 5 s in all_reduce of float32[4] at train.py:7"."""
    first = min(waiting, key=lambda one: one.rank)
    same = [one.rank for one in waiting if (one.waits, one.place) == (first.waits, first.place)]
    has = "has" if len(same) == 1 else "have"
    return f"{_names(same)} {has} waited {seconds:.0f} s in {first.waits} at {first.place}"


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _ROWS:
        return f"ranks {', '.join(map(str, ranks[:_ROWS]))} and {len(ranks) - _ROWS} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
