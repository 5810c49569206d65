from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import Script


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts ranks of a script, of which nothing is left after the test."""
    started: list[Script] = []

    def begin(text: str, *launcher: Any, **options: Any) -> Script:
        started.append(Script(tmp_path, text, *launcher, **options))
        return started[-1]

    yield begin
    for script in started:
        script.clean_up()
