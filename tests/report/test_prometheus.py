"""`shoal report --prometheus`: lines of Prometheus's text format."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from helpers.checkpoint_files import small_run

LINE = re.compile(r'shoal_([a-z_]+)\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)')


@pytest.mark.processes
def test_metrics_of_a_run_with_a_quote_in_its_name(world: shoal.World, tmp_path: Path) -> None:
    directory = tmp_path / 'a "b'
    for stop in (4, 8):
        with small_run(world, directory) as run:
            run.restore()
            for batch in run.loader.epochs(9):
                run.steps["step"](batch)
                run.tick(every=4)
                if run.step == stop:
                    break
    command = [sys.executable, "-m", "shoal", "report", str(directory), "--prometheus"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match[2] == str(directory).replace('"', '\\"')
        found[match[1]] = float(match[3])
        assert f"# TYPE shoal_{match[1]} " in printed
    assert (found["step"], found["restarts_total"], found["ranks"]) == (8, 1, 1)
    assert found["step_seconds"] > 0
    assert 0 <= found["goodput_ratio"] <= 1
    assert found["running"] == 0
    assert found["loss"] > 0
