"""All options of the command line, one line for each command: a new one is a decision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from shoal.cli.main import app

LISTED = Path(__file__).with_name("options.txt")


def lines_of(command: Any, name: str) -> Iterator[str]:
    for each, inner in sorted(getattr(command, "commands", {}).items()):
        yield from lines_of(inner, f"{name} {each}")
    if not hasattr(command, "commands"):
        options = [max(each.opts, key=len) for each in command.params if each.opts[0][0] == "-"]
        yield " ".join([f"{name}:", *sorted(options)])


def test_options_are_those_of_the_list() -> None:
    """Before you add one: would a better default, or an argument of the script, do?"""
    assert list(lines_of(typer.main.get_command(app), "shoal")) == LISTED.read_text().splitlines()
