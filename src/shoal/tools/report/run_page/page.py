"""The page of a report: its sections and their order."""

from __future__ import annotations

from dataclasses import replace

from shoal.tools.report import BottleneckReport, History
from shoal.tools.report.html import Block, KeyNumbers, Page, Section, Table, Text
from shoal.tools.report.run_page import figures, tables
from shoal.util.clock import CLOCK, local_time
from shoal.util.units import counted, duration


def run_page(history: History, verdict: BottleneckReport) -> Page:
    """Return the page of a run in its current state; empty sections are left out."""
    drawn = figures.all_figures(history, verdict.judged)
    latest = history.latest
    sections: list[tuple[str, list[Block]]] = [
        (
            "At a glance",
            [KeyNumbers(pairs=tables.key_facts(history, verdict)), *_findings(history, verdict)],
        )
    ]
    if verdict.judged:
        newest = verdict.judged[-1]
        sections += [
            (
                "Where the time goes",
                [
                    *_warm_up(verdict),
                    tables.parts_table(newest),
                    *drawn["time"],
                    tables.rank_table(newest),
                ],
            ),
            ("Stragglers", _unless_empty(tables.stragglers_table(verdict))),
        ]
    sections += [
        ("Measured speed", _unless_empty(tables.splits_table(history))),
        ("Loss and throughput", [*drawn["progress"]]),
    ]
    if latest is not None:
        sections += [
            ("Collectives", _unless_empty(tables.collectives_table(latest))),
            (
                "Memory and power",
                [*_speed(verdict), *drawn["usage"], *_unless_empty(tables.usage_table(latest))],
            ),
        ]
    sections += [
        ("Checkpoints", _unless_empty(tables.saves_table(history))),
        ("Attempts", _unless_empty(tables.attempts_table(history, verdict))),
    ]
    if latest is not None:
        sections += [
            ("Ranks and hosts", _unless_empty(tables.placement_table(latest))),
            ("Configuration and versions", _unless_empty(tables.settings_table(latest))),
        ]
    return Page(
        title=f"Run {history.directory}",
        verdict=verdict.sentence,
        sections=[Section(heading=name, blocks=blocks) for name, blocks in sections if blocks],
        about=f"shoal report, {local_time(CLOCK.wall(), '%Y-%m-%d %H:%M:%S')}. "
        f"From the events of {counted(history.files, 'rank')}.",
    )


def _findings(history: History, verdict: BottleneckReport) -> list[Block]:
    found: list[Block] = [Text(text=each.text, advice=each.advice) for each in verdict.findings]
    if verdict.judged and not found:
        found.append(Text(text="No problem found: no rank is slower than the others in any part."))
    if history.skipped:
        found.append(Text(text=tables.describe_unreadable(history)))
    return found


def _warm_up(verdict: BottleneckReport) -> list[Block]:
    one = verdict.judged[-1]
    if not one.warm_up:
        return []
    first = "The first step" if one.warm_up == 1 else f"The first {one.warm_up} steps"
    return [
        Text(
            text=f"{first} of the last attempt took {duration(one.warm_up_seconds)} (compilation, "
            "checks, cold caches), not included below."
        )
    ]


def _speed(verdict: BottleneckReport) -> list[Block]:
    text = tables.describe_speed(verdict.judged[-1]) if verdict.judged else ""
    return [Text(text=text)] if text else []


def _unless_empty(table: Table) -> list[Block]:
    """Return a table without its empty columns; nothing if it has no row."""
    kept = [place for place in range(len(table.head)) if any(row[place] for row in table.rows)]
    rows = [[row[place] for place in kept] for row in table.rows]
    return [replace(table, head=[table.head[place] for place in kept], rows=rows)] if rows else []
