"""The page as lines of a given width and height, from a snapshot, independent of the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.text import Text

from shoal.tools.report.dashboard.charts import draw_curve, draw_sparkline, drawable_seconds
from shoal.tools.report.dashboard.rank_table import count_leaves, legend_lines, rank_table_lines
from shoal.tools.report.dashboard.snapshot import (
    OVER,
    Kind,
    MetricCurve,
    RunProgress,
    Slowest,
    Snapshot,
)
from shoal.tools.report.dashboard.theme import WORDS, TerminalStyle, ascii_duration, push_right
from shoal.util.units import age, elapsed, four_digits

STYLES: dict[Kind, str] = {
    "reading": "yellow",
    "absent": "yellow",
    "starting": "yellow",
    "running": "green",
    "silent": "yellow",
    "ended": "green",
    "preempted": "yellow",
    "interrupted": "yellow",
    "failed": "bold red",
}
SIDE_BY_SIDE = 60
"""The number of columns from which two curves are next to each other."""
LABEL = 10
GAPS = 4
CURVE_LINES = (5, 18)
"""Lines of a curve with a title; with less room a curve takes one line."""


def dashboard_lines(
    snapshot: Snapshot,
    width: int,
    height: int,
    look: TerminalStyle,
    *,
    leaf: int = 0,
    keys: bool = False,
) -> list[Text]:
    """Return at most `height` lines, none of them wider than `width` cells.

    `leaf` is the page of the ranks: 0 has the slowest and the fastest, the others all ranks by number.
    With `keys` the last line explains the keys.
    """
    plan = _plan(snapshot, width, height, look, keys=keys)
    gap = [Text()] if plan.airy else []
    lines = [_head(snapshot, width, look), *plan.verdict, *gap, *_progress(snapshot, width, look)]
    if plan.curves:
        lines += [*gap, *_curves(snapshot, width, plan.curves, look)]
    if plan.ranks:
        rows = rank_table_lines(snapshot, width, plan.ranks, leaf, look, heading=plan.heading)
        lines += [*gap, *rows, *plan.legend]
    if plan.facts:
        lines += [*gap, *plan.facts]
    if plan.footer:
        lines += [Text() for _ in range(height - 1 - len(lines))]
        lines.append(_footer(snapshot, plan, leaf, look))
    return [look.cut(line, width) for line in lines[:height]]


def count_turns(snapshot: Snapshot, width: int, height: int, look: TerminalStyle) -> int:
    """Return the number of pages of ranks after the first."""
    plan = _plan(snapshot, width, height, look, keys=True)
    return count_leaves(snapshot, plan.rows)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The allocation of the page: complete texts, and the number of lines for the rest."""

    verdict: list[Text]
    facts: list[Text]
    legend: list[Text]
    curves: int
    ranks: int
    heading: bool
    airy: bool
    footer: bool

    @property
    def rows(self) -> int:
        """The number of lines for ranks alone."""
        return self.ranks - self.heading


def _plan(snapshot: Snapshot, width: int, height: int, look: TerminalStyle, *, keys: bool) -> _Plan:
    """Divide the height: text first, then a curve and some ranks, then more of both."""
    verdict = look.wrapped(
        look.safe(snapshot.verdict), width, 1 if height < 10 else 2 if height < 30 else 3
    )
    verdict = verdict if snapshot.verdict else []
    facts = _facts(snapshot, width, look)[: max(1, height // 5)] if height >= 8 else []
    footer, heading = keys and height >= 14, height >= 14
    words = 1 + len(verdict) + (snapshot.progress is not None) + len(facts) + footer
    rest = max(0, height - words)
    keyed = legend_lines(snapshot, width, 1 if height < 20 else 2, look) if rest >= 4 else []
    rest -= len(keyed)
    wanted = heading + len(snapshot.ranks) if snapshot.ranks else 0
    airy = rest >= GAPS + CURVE_LINES[0] + min(wanted, 12)
    rest -= GAPS * airy
    curves = 0
    if snapshot.loss is not None or snapshot.throughput is not None:
        least, most = CURVE_LINES
        if rest >= least + min(wanted, 3):
            curves = min(most, max(least, rest // 3, rest - wanted))
        elif rest >= 2 + min(wanted, 2):
            curves = 1 if width >= SIDE_BY_SIDE else 2
    ranks = max(0, min(wanted, rest - curves))
    return _Plan(
        verdict=verdict,
        facts=facts,
        legend=keyed if ranks else [],
        curves=curves,
        ranks=ranks,
        heading=heading,
        airy=airy,
        footer=footer,
    )


def _head(snapshot: Snapshot, width: int, look: TerminalStyle) -> Text:
    """Return the run and its status, with its size and the time at the right."""
    state = snapshot.state
    said = {
        "reading": "reading events",
        "absent": "waiting for the run",
        "starting": "starting",
        "running": "running",
        "silent": f"silent for {age(drawable_seconds(state.since))}",
    }.get(state.kind, f"{state.kind} {age(drawable_seconds(state.since))} ago")
    hosts = len({rank.host for rank in snapshot.ranks if rank.host})
    world = f"{snapshot.size:,} rank{'s' * (snapshot.size != 1)}" if snapshot.size else ""
    world += f" on {hosts:,} host{'s' * (hosts != 1)}" if world and hosts else ""
    right = look.dot.join(text for text in (world, look.safe(snapshot.clock)) if text)
    name = Text(look.safe(snapshot.run), "bold")
    most = max(8, width - len(said) - len(look.dot))
    if name.cell_len > most:  # the end of a path is more specific than its beginning
        name = Text(look.sign("…", "~") + set_cell_size(name.plain[::-1], most - 1)[::-1], "bold")
    return push_right(Text.assemble(name, look.dot, (said, STYLES[state.kind])), right, width)


def _progress(snapshot: Snapshot, width: int, look: TerminalStyle) -> list[Text]:
    """Return one line: a bar and all that fits next to it, or the reason why there is no bar."""
    now = snapshot.progress
    if now is None:
        if snapshot.state.kind == "absent":
            return look.wrapped(look.safe(snapshot.state.reason), width, 6)
        return [Text("" if snapshot.state.kind == "reading" else "no step recorded yet")]
    over, spent = snapshot.state.kind in OVER, elapsed(drawable_seconds(now.elapsed))
    parts = {
        "percent": _percent(now),
        "step": f"step {now.step:,}",
        "epoch": _epoch(now),
        "samples": f"{now.position:,} samples",
        "left": "" if now.left is None or over else f"{elapsed(drawable_seconds(now.left))} left",
        "elapsed": f"in {spent}" if over else f"{spent} so far",
    }
    parts = {name: text for name, text in parts.items() if text}
    for name in ("samples", "elapsed", "epoch"):
        if len(look.dot.join(parts.values())) + 12 * bool(now.goal) > width:
            parts.pop(name, None)
    words = look.dot.join(parts.values())
    line = Text()
    room = min(40, width - len(words) - 1)
    if now.goal and room >= 4:
        done = round(room * min(1.0, max(0.0, now.position / now.goal)))
        line.append(look.sign("━", "#") * done, "green")
        line.append(look.sign("─", "-") * (room - done), "dim")
        line.append(" ")
    return [line.append(words)]


def _percent(now: RunProgress) -> str:
    if not now.goal:
        return ""
    permille = min(1000, 1000 * now.position // now.goal)
    return "100 %" if permille == 1000 else f"{permille / 10:.1f} %"  # 100 % only at the end


def _epoch(now: RunProgress) -> str:
    if not now.epoch_size:
        return ""
    goal = f"/{round(now.goal / now.epoch_size, 2):g}" if now.goal else ""
    return f"epoch {now.position / now.epoch_size:.2f}{goal}"


def _curves(snapshot: Snapshot, width: int, height: int, look: TerminalStyle) -> list[Text]:
    """Return loss and throughput, next to or below each other, as curves or in one line each."""
    drawn = [
        each
        for each in (
            ("loss", "", snapshot.loss, False),
            ("throughput", "samples/s", snapshot.throughput, True),
        )
        if each[2] is not None
    ]
    beside = width >= SIDE_BY_SIDE
    cells = (width - 3 * (len(drawn) - 1)) // len(drawn) if beside else width
    first = height if beside or len(drawn) == 1 else (height + 1) // 2
    heights = (first, first if beside else height - first) if height >= CURVE_LINES[0] else (0, 0)
    parts = [_metric(*each, cells, rows, look) for each, rows in zip(drawn, heights, strict=False)]
    if not beside:
        return [line for lines in parts for line in lines][:height]
    return [
        Text("   ").join(look.fitted(each, cells) for each in row) for row in zip(*parts, strict=True)
    ]


def _metric(
    title: str,
    unit: str,
    drawn: MetricCurve | None,
    zero: bool,
    width: int,
    height: int,
    look: TerminalStyle,
) -> list[Text]:
    """Return a curve below a title; next to it if `height` is 0."""
    if drawn is None:
        return []
    value = "-" if drawn.now is None else four_digits(drawn.now)
    line = Text.assemble((title, "bold"), f" {value} ")
    if not height:
        room = width - line.cell_len
        row = draw_sparkline(drawn.values, room, look, zero=zero, weights=drawn.weights)
        return [line.append(row, "cyan")]
    line = Text.assemble((title, "bold"), f" {value} {unit}".rstrip())
    rows = draw_curve(drawn.values, width, height - 1, look, zero=zero, weights=drawn.weights)
    return [push_right(line, f"steps {drawn.first:,} to {drawn.last:,}", width), *rows]


def _facts(snapshot: Snapshot, width: int, look: TerminalStyle) -> list[Text]:
    """Return the lines of text, the most important first; each begins with its most important part."""
    facts = []
    if snapshot.state.kind in OVER and snapshot.state.reason:
        facts.append(("ended", snapshot.state.reason))
    if snapshot.slowest is not None:
        facts.append(("slowest", _slowest(snapshot.slowest)))
    elif len(snapshot.ranks) > 1 and snapshot.progress is not None:
        facts.append(("slowest", "no rank stands out"))
    facts.append(("saved", _saves(snapshot)))
    if snapshot.restarts.count:
        last = f"; {snapshot.restarts.last}" if snapshot.restarts.last else ""
        facts.append(("restarts", f"{snapshot.restarts.count:,}{last}"))
    if snapshot.missing:
        first = ", ".join(map(str, snapshot.missing[:8]))
        more = ", …" if len(snapshot.missing) > 8 else ""
        facts.append(("missing", f"no events from rank {look.safe(first + more)}"))
    return [
        Text.assemble((label.ljust(LABEL), "dim"), look.safe(text)) for label, text in facts if text
    ]


def _slowest(slowest: Slowest) -> str:
    where = f" on {slowest.host}" if slowest.host else ""
    since = f", since step {slowest.since:,}" if slowest.since is not None else ""
    part = WORDS.get(slowest.part, slowest.part)
    excess = ascii_duration(slowest.excess)
    return f"rank {slowest.rank}{where} in {part}: {excess} above the others{since}"


def _saves(snapshot: Snapshot) -> str:
    saves = snapshot.saves
    parts = []
    if saves.failed:
        parts.append(f"FAILED {saves.failed}")
    if saves.step is not None:
        parts.append(f"step {saves.step:,}, {age(drawable_seconds(saves.ago))} ago")
    elif snapshot.progress is not None:
        parts.append("nothing yet")
    if snapshot.state.kind not in OVER and saves.due is not None:
        step = f" {saves.next_step:,}" if saves.next_step is not None else ""
        due = elapsed(drawable_seconds(abs(saves.due)))
        parts.append(f"next{step} in {due}" if saves.due >= 0 else f"next{step} {due} late")
    if saves.step is not None:
        parts.append(f"took {ascii_duration(saves.seconds)}, {ascii_duration(saves.blocked)} blocked")
    return "; ".join(parts)


def _footer(snapshot: Snapshot, plan: _Plan, leaf: int, look: TerminalStyle) -> Text:
    keys = ["q quit"]
    if count_leaves(snapshot, plan.rows):
        keys.append(f"{look.sign('↑ ↓', 'up, down')} page through all ranks")
    if leaf:
        keys.append("Home slowest and fastest")
    return Text(look.dot.join(keys), "dim")
