"""The output of `shoal info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from shoal.tools.doctor.info.machine import MachineInfo
from shoal.tools.doctor.info.ranks import RankInfo, differences, rows
from shoal.util.decision import Decision
from shoal.util.tables import add_row, make_table, print_line, print_pairs, print_rows, print_table

_NARROW = 14


def print_machine(console: Console, found: MachineInfo) -> None:
    """Print the hardware and software of this machine."""
    print_pairs(console, "Versions", found.versions)
    print_pairs(console, "Hardware, as this process may use it", found.hardware)
    print_pairs(console, "Optional packages", found.packages)
    print_pairs(
        console, "Launchers on PATH", found.programs or [("none", "shoal run -n N SCRIPT needs none")]
    )


def print_launchers(console: Console, variables: Mapping[str, str]) -> None:
    """Print the launchers in the order of detection, each with its variables that are set."""
    print_pairs(
        console,
        "Launchers, in the order of detection, and their variables here",
        [(name, found or "none") for name, found in variables.items()],
    )


def print_choices(console: Console, made: Sequence[Decision[object]]) -> None:
    """Print each decision with its reason and the rejected alternatives."""
    table = make_table("setting", "chosen", "reason, and rejected alternatives")
    table.columns[1].max_width = max(_NARROW, console.width // 4)
    for choice in made:
        whys = [choice.reason, *(f"not {name}: {why}" for name, why in choice.rejected.items())]
        for index, why in enumerate(whys):
            first = (choice.what, _spelled(choice.value)) if index == 0 else ("", "")
            add_row(table, *first, why)
    print_table(console, "Decisions and their reasons (on rank 0)", table)


def print_ranks(console: Console, found: Sequence[RankInfo]) -> None:
    """Print all ranks, and their differences."""
    headers = ("rank", "host", "local", "cores", "threads", "device")
    print_rows(console, f"{len(found)} ranks", headers, rows(found))
    lines = list(differences(found)) or ["Shoal, Python and torch are the same on all ranks."]
    print_line(console, *lines)


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_spelled, value)) or "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
