"""A report for terminals: the verdict, the findings, and the main tables."""

from __future__ import annotations

from rich.console import Console

from shoal.tools.report import BottleneckReport, History
from shoal.tools.report.html import Table
from shoal.tools.report.run_page import tables
from shoal.util.tables import print_line, print_pairs, print_rows

MOST = 16
"""Maximum number of ranks that are listed; of more ranks the slowest are."""


def print_report(console: Console, history: History, verdict: BottleneckReport) -> None:
    """Print the report."""
    print_line(console, verdict.sentence, "")
    for each in verdict.findings:
        print_line(console, each.text, f"    {each.advice}")
    if verdict.findings:
        print_line(console, "")
    print_pairs(console, f"Run {history.directory}", tables.key_facts(history, verdict))
    if verdict.judged:
        _print(console, tables.parts_table(verdict.judged[-1]))
        if len(verdict.judged[-1].profile.ranks) > 1:
            _print(console, tables.main_parts_table(verdict.judged[-1], MOST))
    if verdict.stragglers:
        _print(console, tables.stragglers_table(verdict))
    splits = tables.splits_table(history)
    if splits.rows:
        _print(console, splits)
    if len(history.attempts) > 1:
        _print(console, tables.attempts_table(history, verdict), without="warm-up")
    if history.skipped:
        print_line(console, tables.describe_unreadable(history))


def _print(console: Console, table: Table, *, without: str = "") -> None:
    chosen = [place for place, name in enumerate(table.head) if name != without]
    head, *rows = ([line[place] for place in chosen] for line in table.lines)
    print_rows(console, table.caption, head, rows, right=table.right)
