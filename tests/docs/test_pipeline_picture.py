"""The picture of a pipeline schedule is what its script draws today."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_committed_picture_is_that_of_the_script(repository: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "pipeline_picture", repository / "benchmarks/pipeline_picture.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == script.PICTURE.read_bytes()
