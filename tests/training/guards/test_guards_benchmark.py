"""benchmarks/guards.py: flips of each kind on three ranks, and a run without flips."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.full]


def measure(repository: Path, strategy: str, *options: str) -> Any:
    command = [sys.executable, "benchmarks/guards.py", "--json", f"--strategies={strategy}", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if line.startswith("|"))
    return json.loads(done.stdout.splitlines()[-1])["guards"][strategy]


@pytest.mark.long
def test_guards_find_flips_that_change_the_result(repository: Path) -> None:
    rows = {row["kind"]: row for row in measure(repository, "bits", "--flips=1")}
    for kind in ("parameter", "optimizer state"):
        assert rows[kind]["continuity"] == [1, 1]
    missed = {kind: row["missed"] for kind, row in rows.items() if kind != "running statistics"}
    assert missed == dict.fromkeys(missed, 0)
    assert len(missed) == 6


@pytest.mark.long
def test_checks_without_flips_raise_no_alarm(repository: Path) -> None:
    found = measure(repository, "single", "--quiet=20")
    assert found["steps"] == 20
    (state,) = found["checks"]
    assert state["checks"] >= 5
