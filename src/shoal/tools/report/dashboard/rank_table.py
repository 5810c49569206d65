"""The table of ranks: the mean step of each rank as a stacked bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from shoal.tools.report.dashboard.charts import draw_bar, drawable_seconds
from shoal.tools.report.dashboard.snapshot import RankStats, Snapshot
from shoal.tools.report.dashboard.theme import PARTS, TerminalStyle, ascii_duration
from shoal.util.units import size

HOST_CELLS = 16
NARROW = 60
"""Columns below which words are short."""
BAR_CELLS = 8
"""Minimum width of a useful bar; the host is left out before a bar gets narrower."""


@dataclass(frozen=True, kw_only=True)
class RankSelection:
    """Which ranks are shown, which are only summarized, and the text about it."""

    shown: tuple[RankStats, ...]
    said: str = ""


def select_ranks(snapshot: Snapshot, room: int, leaf: int, look: TerminalStyle) -> RankSelection:
    """Return the ranks for `room` lines; the last line describes the selection if it is not all.

    Page 0 has the slowest and the fastest, with a summary of the others; the next pages have all ranks
    by number.
    """
    ranks = snapshot.ranks
    if len(ranks) <= room or room < 1:
        return RankSelection(shown=ranks[: max(0, room)])
    if room == 1:
        return RankSelection(shown=(), said=f"{len(ranks):,} ranks: {_spread(ranks, look)}")
    room -= 1
    leaves = count_leaves(snapshot, room + 1)
    if leaf > 0:
        at = min(leaf, leaves) - 1
        shown = ranks[at * room : (at + 1) * room]
        return RankSelection(
            shown=shown,
            said=f"ranks {shown[0].number:,} to {shown[-1].number:,} of {len(ranks):,}, "
            f"page {at + 1:,} of {leaves:,}",
        )
    slow = (2 * room + 2) // 3
    by_time = sorted(ranks, key=lambda rank: (-drawable_seconds(rank.own), rank.number))
    first = snapshot.slowest.rank if snapshot.slowest is not None else None
    by_time.sort(key=lambda rank: rank.number != first)  # the rank in the verdict is at the top
    fast = room - slow
    others = by_time[slow : len(by_time) - fast]
    ends = f"the {slow:,} slowest" + (f" and the {fast:,} fastest" if fast else "")
    return RankSelection(
        shown=(*by_time[:slow], *by_time[len(by_time) - fast :]),
        said=f"{ends} of {len(ranks):,}; {len(others):,} others: {_spread(others, look)}",
    )


def count_leaves(snapshot: Snapshot, room: int) -> int:
    """Return the number of pages after the first; 0 if all ranks fit."""
    if len(snapshot.ranks) <= room or room < 2:
        return 0
    return math.ceil(len(snapshot.ranks) / (room - 1))


def _spread(ranks: Sequence[RankStats], look: TerminalStyle) -> str:
    """Return the range of the ranks' own time, and of their memory."""
    own = [drawable_seconds(rank.own) for rank in ranks]
    text = f"{ascii_duration(min(own))} to {ascii_duration(max(own))} of own work"
    memory = [rank.memory for rank in ranks if rank.memory is not None]
    return text + (f"{look.dot}{size(min(memory))} to {size(max(memory))}" if memory else "")


def rank_table_lines(
    snapshot: Snapshot, width: int, room: int, leaf: int, look: TerminalStyle, *, heading: bool
) -> list[Text]:
    """Return the rows, with a heading if it is wanted, in at most `room` lines."""
    choice = select_ranks(snapshot, room - heading, leaf, look)
    number = max((len(str(rank.number)) for rank in choice.shown), default=1) + 2
    widest = max((Text(look.safe(rank.host)).cell_len for rank in choice.shown), default=0)
    host = min(widest, HOST_CELLS) + 1 if widest else 0
    memory = 9 if any(rank.memory is not None for rank in snapshot.ranks) else 0
    left = width - number - 1 - 9
    if left - host - memory < 2 * BAR_CELLS:
        host = 0
    if left - host - memory < BAR_CELLS:
        memory = 0
    longest = max((drawable_seconds(rank.seconds) for rank in snapshot.ranks), default=0.0)
    bar = max(0, left - host - memory)
    lines = []
    if heading:
        steps = f"mean of {snapshot.window:,} steps" if snapshot.window > 1 else "one step"
        title = f"step time by rank, {steps}" if bar >= 40 else "step time by rank"
        used = ("GPU mem" if snapshot.device_memory else "memory") if memory else ""
        lines.append(Text(f"{title:{number + host + 1 + bar}}{'step':>9}{used:>{memory}}", "bold"))
    for rank in choice.shown:
        slowest = snapshot.slowest is not None and snapshot.slowest.rank == rank.number
        line = Text(look.sign("▸", ">") if slowest else " ")
        line.append(f"{rank.number:>{number - 2}} ", "bold" if slowest else "")
        if host:
            line.append_text(look.fitted(Text(look.safe(rank.host)), host - 1)).append(" ")
        line.append_text(draw_bar(dict(rank.parts), longest, bar, look))
        seconds = drawable_seconds(rank.seconds)
        line.append(f"{ascii_duration(seconds) if seconds else '-':>10}")
        if memory:
            line.append(f"{'-' if rank.memory is None else size(rank.memory):>{memory}}")
        lines.append(line)
    return [*lines, Text(choice.said, "dim")] if choice.said else lines


def legend_lines(snapshot: Snapshot, width: int, lines: int, look: TerminalStyle) -> list[Text]:
    """Return the parts in use, each with its letter and its fraction of all ranks' time.

    The names are short if there is little room.
    """
    sums = [
        math.fsum(drawable_seconds(rank.parts.get(part.name, 0.0)) for rank in snapshot.ranks)
        for part in PARTS
    ]
    whole = math.fsum(sums)
    if not whole or lines < 1:
        return []
    entries = []
    for part, seconds in zip(PARTS, sums, strict=True):
        share = 100 * seconds / whole
        if share >= 0.05:
            said = f"{part.word} {share:.0f} %" if share >= 1 else f"{part.word} <1 %"
            words = part.short if width < NARROW else said
            entries.append(Text.assemble((part.letter, part.style(look)), f" {words}"))
    return _flowing(entries, width, lines, look)


def _flowing(entries: Sequence[Text], width: int, lines: int, look: TerminalStyle) -> list[Text]:
    """Return entries in as few lines as hold them; entries without room are left out."""
    rows = [Text()]
    for entry in entries:
        gap = 2 if rows[-1].plain else 0
        if gap and rows[-1].cell_len + gap + entry.cell_len > width:
            if len(rows) == lines:
                rows[-1].append("  " + look.sign("…", "~"))
                break
            rows.append(Text())
            gap = 0
        rows[-1].append(" " * gap)
        rows[-1].append_text(entry)
    return rows
