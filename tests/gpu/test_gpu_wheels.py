"""The wheels for a machine without a network: what is downloaded, and what is left to the machine."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gpu_wheels
import pytest


def test_neither_torch_nor_numpy_is_downloaded() -> None:
    found = gpu_wheels.requirements()
    assert any(each.startswith("orjson") for each in found)
    assert {"pytest", "pytest-timeout", "hatchling"} <= {*found}
    assert not [each for each in found if each.startswith(("torch", "numpy"))]


def test_an_interpreter_without_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(SystemExit, match=r"has no torch.*\n.*PYTHON="):
        gpu_wheels.install(tmp_path, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.full
def test_what_is_missing_is_said_and_torch_stays(tmp_path: Path) -> None:
    """From an empty directory: pip has no wheel of what builds Shoal."""
    (tmp_path / "wheels").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, gpu_wheels.__file__, "install", str(tmp_path / "wheels")),
            *("--environment", str(tmp_path / "made")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "hatchling" in done.stderr
    assert "fix:   gpu_wheels.py download" in done.stderr
    seen = subprocess.check_output(
        [tmp_path / "made/bin/python", "-c", "import torch; print(torch.__file__)"], text=True
    )
    assert Path(seen.strip()).is_relative_to(sys.prefix)
