"""The output of `shoal info` as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.tools.doctor.info.machine import machine_facts
from shoal.tools.doctor.info.ranks import RankInfo, differences, rows
from shoal.util.decision import Decision
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text


def info_document(
    *,
    launchers: Mapping[str, str] | None = None,
    decisions: Sequence[Decision[object]] = (),
    ranks: Sequence[RankInfo] = (),
) -> Document:
    """Return this machine, then what is known of a launch.

    `launchers` are the launchers in the order of detection, each with its variables that are set,
    `decisions` those of rank 0.
    """
    blocks: list[DocumentBlock] = list(machine_facts())
    if launchers is not None:
        caption = "Launchers, in the order of detection, and their variables here"
        pairs = [(name, found or "none") for name, found in launchers.items()]
        blocks.append(KeyNumbers(caption=caption, pairs=pairs))
    blocks.append(decisions_table(decisions))
    if len(ranks) > 1:
        head = ("rank", "host", "local", "cores", "threads", "device")
        blocks.append(Table(caption=f"{len(ranks)} ranks", head=head, rows=rows(ranks)))
        same = "Shoal, Python and torch are the same on all ranks."
        blocks += [Text(text=line) for line in list(differences(ranks)) or [same]]
    return Document(title="shoal info", sections=[Section(blocks=blocks)])


def decisions_table(made: Sequence[Decision[object]]) -> Table:
    """Return each decision with its reason and the rejected alternatives."""
    lines = []
    for choice in made:
        lines.append((choice.what, _spelled(choice.value), choice.reason))
        lines += [("", "", f"not {name}: {why}") for name, why in choice.rejected.items()]
    head = ("setting", "chosen", "reason, and rejected alternatives")
    return Table(caption="Decisions and their reasons (on rank 0)", head=head, rows=lines)


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_spelled, value)) or "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
