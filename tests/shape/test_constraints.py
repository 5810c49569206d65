"""What is pinned can be installed with the oldest Python that is promised."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet


def test_every_pin_admits_the_oldest_python(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    constraints = (repository / "constraints.txt").read_text()
    wanted = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", constraints, re.MULTILINE):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or of an extra that is not installed
        if found.version == version:
            wanted[f"{name}=={version}"] = str(found.metadata.json.get("requires_python", ""))
    assert len(wanted) > 20
    assert [pin for pin, python in wanted.items() if oldest not in SpecifierSet(python)] == []
