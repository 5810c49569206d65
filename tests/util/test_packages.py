"""Which versions are installed: those that Python imports."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from shoal.util.packages import packages


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_of_two_versions_on_the_path_the_first_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of PYTHONPATH come before what is installed, and Python imports what comes first."""
    for number, folder in enumerate(("first", "second"), 1):
        install(tmp_path / folder, "numpy", f"1.0.{number}")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert sys.path[0] == str(tmp_path / "second")
    assert packages()["numpy"] == metadata.version("numpy") == "1.0.2"


def test_spellings_of_one_name_are_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "old", "some_package", "1.0")
    install(tmp_path / "new", "Some.Package", "2.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "new"), str(tmp_path / "old")])
    assert packages() == {"Some.Package": "2.0"}
