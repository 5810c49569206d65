from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Command
from helpers.scripts import Script


@pytest.fixture
def start(tmp_path: Path, running_commands: list[Command]) -> Callable[..., Script]:
    """Starts ranks of a script, of which nothing is left after the test."""

    def begin(text: str, *launcher: Any, **options: Any) -> Script:
        script = Script(tmp_path, text, *launcher, **options)
        running_commands.append(script)
        return script

    return begin
