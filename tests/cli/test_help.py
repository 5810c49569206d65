"""The help of every command: short summaries, described options, two examples, `-h`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from helpers.cli import shoal
from shoal.cli.main import app

SUMMARY = 50


def commands(group: Any, path: str = "shoal") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL)
def test_summaries_are_short_and_options_are_described(name: str) -> None:
    command = ALL[name]
    summary = (command.help or "").strip().split("\n")[0]
    assert 0 < len(summary) <= SUMMARY
    missing = [each.name for each in command.params if not getattr(each, "help", None)]
    assert missing == []
    if not hasattr(command, "commands"):
        assert name in (command.epilog or "")


def test_commands_stand_in_panels() -> None:
    done = shoal("-h")
    assert done.exit_code == 0
    panels = ("Train", "Observe", "Clusters", "Plan", "Measure", "Verify")
    assert [panel in done.stdout for panel in panels] == [True] * len(panels)
    assert "124 a rank hung" in " ".join(done.stdout.split())
