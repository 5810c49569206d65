"""A fixture for tests of `shoal run`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import Command


@pytest.fixture
def start_run(tmp_path: Path, start_command: Callable[..., Command]) -> Callable[..., Command]:
    """Starts `shoal run` of a script, as installed: from a file whose folder is not the current one."""

    def begin(script: str, *options: str, stdout: int = subprocess.PIPE) -> Command:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/shoal").write_text("from shoal.cli.main import main; main()")
        return start_command([sys.executable, "bin/shoal", "run", *options], stdout=stdout)

    return begin
