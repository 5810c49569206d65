"""The machine, the choices of `shoal.init` and their reasons: `shoal info`, alone or in a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.distributed import env_vars
from shoal.distributed.init import init
from shoal.tools.doctor.findings import RankFacts
from shoal.tools.doctor.info.machine import RankInfo, gather, machine_facts, rows, version_differences
from shoal.util.decision import Decision
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.errors import ShoalError
from shoal.util.tables import print_document

if TYPE_CHECKING:
    from rich.console import Console


JOIN_SECONDS = 60.0
"""How long the ranks of a launch wait for each other; it can be short, as no rank prepares data."""


def print_info(console: Console) -> None:
    """Join the world that a launcher started, and print on rank 0 its settings and their reasons.

    If the environment contradicts itself or the world can't be formed, print the information that is
    available and raise the ShoalError.
    """
    try:
        placement = env_vars.placement()
    except ShoalError:
        print_document(console, info_document(launchers=env_vars.launcher_variables()))
        raise
    decisions: Sequence[Decision[object]] = placement.choices
    ranks: list[RankFacts[RankInfo]] = []
    try:
        with init(prepare_timeout=JOIN_SECONDS) as world:
            ranks, decisions = gather(world), world.decisions
    finally:
        if placement.rank == 0:
            print_document(console, info_document(decisions=decisions, ranks=ranks))


def info_document(
    *,
    launchers: Mapping[str, str] | None = None,
    decisions: Sequence[Decision[object]] = (),
    ranks: Sequence[RankFacts[RankInfo]] = (),
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
        blocks += [Text(text=line) for line in list(version_differences(ranks)) or [same]]
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
