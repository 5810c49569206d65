"""The documented evidence of causes, and scripts of others, each with one fault."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.audits import audit
from shoal.tools.verify.cause_table import CAUSES
from shoal.tools.verify.run_servers import RunServers

PAGE = Path(__file__).parents[2] / "docs" / "monitoring" / "verify.md"
KEPT = Path(__file__).parent / "kept"


def test_the_page_has_the_evidence_of_each_cause() -> None:
    section = PAGE.read_text().partition("## Causes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert rows[0] == ("cause", "evidence")
    assert rows[1:] == [(cause.name.replace("{}", "…"), cause.evidence) for cause in CAUSES]


ROWS = tomllib.loads((KEPT / "expected.toml").read_text())
QUICK = ("step_count", "accum_window", "mf_partial")


def test_the_table_expects_the_right_cause_of_most_kept_scripts() -> None:
    assert set(ROWS) == {path.stem for path in KEPT.glob("*.py")}
    assert sum("cause" in row for row in ROWS.values()) >= 25


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServers]:
    with RunServers(tmp_path_factory.mktemp("servers"), processes=2) as started:
        yield started


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in QUICK else pytest.mark.long)
        for name in ROWS
    ],
)
def test_a_kept_script_gets_its_cause_or_none(home: Path, name: str, servers: RunServers) -> None:
    row = ROWS[name]
    shutil.copy(KEPT / f"{name}.py", home)
    ranks = tuple(int(size) for size in row["ranks"].split(","))
    report = audit(
        home, f"{name}.py", ranks=ranks, kills=1, steps=row.get("steps", 20), servers=servers
    )
    causes = {finding.cause for finding in report.findings if finding.cause is not None}
    right = {cause for cause in causes if cause.name == row.get("cause")}
    lines = {int(cause.line.partition(":")[2]) for cause in right}
    assert bool(right) == ("cause" in row)
    assert lines <= set(row["lines"])
    assert {cause.name for cause in causes - right} <= set(row.get("also", ()))
