from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.audits import SCRIPTS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    (folder / "files").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (folder / "files" / name).touch()
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, folder)
    monkeypatch.chdir(folder)
    return folder
