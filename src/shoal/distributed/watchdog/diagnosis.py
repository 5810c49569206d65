"""Who is to blame for a hang: decided from what each rank says of itself, and put into words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.distributed.watchdog.peer_errors import SAME_STEPS
from shoal.telemetry.flight_recorder import Collective

CONFIRM = 1.0
"""Seconds for which what may be a matter of moments has to last before it is believed."""

BUSY_SECONDS = 300.0
"""Seconds that a rank which compiles, imports or is in a debugger has, however short the limits are."""

_ALIKE = {"all_reduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter"}
"""Collectives whose input has the same size and dtype on all ranks."""


@dataclass(frozen=True, kw_only=True)
class WaitLimits:
    """How many seconds a wait may last: in a step, and where one rank may take its time."""

    step: float
    prepare: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank says of itself.

    `place` is the user's line that its main thread is at, `function` the function of that line.
    `waits` is the collective that it waits in, if it does; an operation alone, of no group, is one
    that torch does not record, such as a receive. `busy` says what it does that may take long.
    `limit` is how many seconds the others may wait for it: more until it has begun its first step.
    `recent` are its last collectives, `groups` its process groups with their ranks.
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
        """The ranks that it may be waiting for; None if that can't be known."""
        if self.waits is None or self.waits.group not in self.groups:
            return None
        return set(self.groups[self.waits.group]) - {self.rank}


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that says nothing: its process is gone (`ended`), or exists and does not answer.

    Or nothing at all came back from its machine (`cut`).
    """

    rank: int
    host: str
    pid: int
    ended: bool
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class HangDiagnosis:
    """The outcome: `line` says it all, `rank` is whom it names, at `where` (host and place).

    It is to be believed when the wait has lasted `patience` seconds longer than it may, and it may
    last for `limit` seconds at least. A `patience` of minus infinity: no wait can help.
    """

    rank: int
    where: str
    line: str
    patience: float = 0.0
    limit: float = 0.0

    def due(self, limits: WaitLimits, limit: float) -> float:
        """After how many seconds of waiting it is to be believed, by a rank whose limit is `limit`."""
        longest = max(limit, self.limit)
        if self.patience == math.inf:
            return max(longest, limits.prepare, BUSY_SECONDS)
        return longest + self.patience


def to_plain(seen: RankReport) -> dict[str, Any]:
    """What crosses between ranks, as JSON."""
    return asdict(seen)


def from_plain(plain: Mapping[str, Any]) -> RankReport:
    """Read what `to_plain` made, after it has been through JSON."""
    waits = plain["waits"]
    recent = tuple(Collective(**each) for each in plain["recent"])
    return RankReport(**{**plain, "waits": waits and Collective(**waits), "recent": recent})


def decide(found: Sequence[RankReport | Absent], *, seconds: float) -> HangDiagnosis | None:
    """Name the rank that the others have been waiting for, for `seconds`; None if nobody waits.

    A rank that does something else than the others comes first, then those whose process is gone,
    those that are elsewhere, those that do not answer. If all of them wait, they wait for each other.
    """
    waiting = [one for one in found if isinstance(one, RankReport) and one.waits is not None]
    if not waiting:
        return None
    size = len(found)
    mismatch = _mismatch([one for one in found if isinstance(one, RankReport)], waiting, size)
    if mismatch is not None:
        return mismatch
    awaited = [one for one in found if _is_awaited(one, waiting)]
    ended = [one for one in awaited if isinstance(one, Absent) and one.ended]
    silent = [one for one in awaited if isinstance(one, Absent) and not one.ended]
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
        line += f"stopped, out of memory, or in a call that keeps Python's lock; {tail}"
        where = f"{silent[0].host}, pid {silent[0].pid}"
        return HangDiagnosis(rank=silent[0].rank, where=where, line=line)
    return _each_other(waiting, size, seconds)


def told_to_have_left(ranks: Sequence[Absent], size: int, mine: int, waited: str) -> str:
    """Name the `ranks` that have left, which caused an error of rank `mine` where it `waited`."""
    line = f"{_who(ranks[0], size)} has ended or left its world (its connection closed){_more(ranks)}, "
    return f"{line}while rank {mine} was in {waited}: see its own error; without one, {SAME_STEPS}"


def table(found: Sequence[RankReport | Absent]) -> str:
    """Where each rank is, a line for each; of many ranks that wait in one place only the first."""
    rows = []
    met: Counter[tuple[str, str]] = Counter()
    for one in found:
        if isinstance(one, Absent):
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
    return "\n".join([*lines, *([f"and {hidden} more at the same places"] if hidden else [])]) + "\n"


_ROWS = 4


def details(found: Sequence[RankReport | Absent]) -> str:
    """All that the ranks said: stacks and last collectives."""
    parts = []
    for one in found:
        parts.append(f"rank {one.rank} on {one.host}\n")
        if isinstance(one, RankReport):
            parts.append(one.stacks)
            for each in one.recent:
                state = "done" if each.done else "not done"
                parts.append(f"  group {each.group}, number {each.number}: {each}, {state}\n")
    return "".join(parts)


def _is_awaited(one: RankReport | Absent, waiting: Sequence[RankReport]) -> bool:
    """Whether it is no waiting rank, and a partner of one, as far as that is known."""
    if isinstance(one, RankReport) and one.waits is not None:
        return False
    return any(each.partners is None or one.rank in each.partners for each in waiting)


def _did_not_arrive(elsewhere: Sequence[RankReport], size: int, tail: str) -> HangDiagnosis:
    # Only if all of them have a reason to take long: else one that has none is to blame.
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


def _cut_off(cut: Sequence[Absent], found: Sequence[RankReport | Absent], tail: str) -> HangDiagnosis:
    """The verdict where machines can't be reached from those whose ranks have answered."""
    away = list(dict.fromkeys(one.host for one in cut))
    here = list(dict.fromkeys(one.host for one in found if one.host not in away))
    line = f"{', '.join(away[:_ROWS])} can't be reached from {', '.join(here[:_ROWS])} "
    line += f"({_names([one.rank for one in cut])} of {len(found)}): "
    line += "a link is cut, or the machine is down"
    if len(here) == 1 and len(away) > 1:
        line = f"{here[0]} reaches no other machine: its own link is cut, or those of all others"
    return HangDiagnosis(rank=cut[0].rank, where=cut[0].host, line=f"{line}; {tail}")


def _each_other(waiting: Sequence[RankReport], size: int, seconds: float) -> HangDiagnosis:
    places = Counter((one.waits, one.place) for one in waiting)
    one = min(waiting, key=lambda one: (places[one.waits, one.place], one.rank))
    where = f"{one.host}, {one.place}"
    rest = [other for other in waiting if (other.waits, other.place) != (one.waits, one.place)]
    if len(places) == 1:
        line = f"all {size} ranks have waited {seconds:.0f} s in {one.waits} at {one.place}, and it "
        line += "does not end: look at the network between their hosts"
    else:
        line = f"{_who(one, size)} waits in {one.waits} at {one.place}; {_waits(rest, seconds)}: "
        line += "they wait for each other"
    return HangDiagnosis(rank=one.rank, where=where, line=line, patience=CONFIRM)


def _mismatch(
    seen: Sequence[RankReport], waiting: Sequence[RankReport], size: int
) -> HangDiagnosis | None:
    """The verdict where ranks called different collectives in the place of one and the same."""
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
    """A call, and where it was made if the rank still waits in it."""
    waits = one.waits
    here = waits is not None and (waits.group, waits.number) == (call.group, call.number)
    return f"{call} at {one.place}" if here else f"{call}"


def _who(one: RankReport | Absent, size: int) -> str:
    return f"rank {one.rank} of {size} on {one.host}"


def _more(ranks: Sequence[RankReport | Absent]) -> str:
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
