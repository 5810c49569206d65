"""The pages of environment variables and of exit codes list what the source reads and returns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shoal.distributed.cluster_env import REQUEUE
from shoal.distributed.watchdog.abort import EXIT_CODE
from shoal.tools.bench.scaling.submission import TIMED_OUT
from shoal.training.preemption import StopReason

PLACES = ("cluster_env/*.py", "env_vars.py", "placement.py")
"""Where `shoal.distributed` reads the variables of launchers."""
NAMES_OF_PYTHON = {"MAY_DIE", "NODES_RUN_ID", "RUN_ID"}
"""Words in `__all__` of these modules that look like variables."""
VARIABLE = re.compile(r'"([A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)+|RANK)"')
EXIT = re.compile(
    r"(?:SystemExit|typer\.Exit|os\._exit|sys\.exit)\((\d+)\)|^ *exit (\d+)", re.MULTILINE
)


def sources(repository: Path) -> Iterator[str]:
    for path in sorted((repository / "src").rglob("*")):
        if path.suffix in {".py", ".jinja"}:
            yield path.read_text(encoding="utf-8")


def page(repository: Path, name: str) -> str:
    return (repository / "docs" / "reference" / name).read_text(encoding="utf-8")


def cells(text: str) -> set[str]:
    """The first cells of all rows of tables."""
    return set(re.findall(r"^\| *([^|]*?) *\|", text, re.MULTILINE))


def test_every_variable_of_shoal_has_a_row_and_no_other_has(repository: Path) -> None:
    used = {name for text in sources(repository) for name in re.findall(r"SHOAL_[A-Z_]+", text)}
    text = page(repository, "environment-variables.md")
    assert {cell.strip("`") for cell in cells(text) if "SHOAL_" in cell} == used


def test_every_variable_of_a_launcher_is_listed(repository: Path) -> None:
    folder = repository / "src" / "shoal" / "distributed"
    read = {
        name
        for place in PLACES
        for path in folder.glob(place)
        for name in VARIABLE.findall(path.read_text(encoding="utf-8"))
    }
    text = page(repository, "environment-variables.md")
    assert len(read) > 60
    assert sorted(name for name in read - NAMES_OF_PYTHON if f"`{name}`" not in text) == []


def test_every_exit_code_has_a_row(repository: Path) -> None:
    written = {
        int(code)
        for text in sources(repository)
        for found in EXIT.findall(text)
        for code in found
        if code
    }
    interrupted = StopReason(kind="interrupted", what="SIGINT", rank=0).code
    preempted = StopReason(kind="preempted", what="SIGTERM", rank=0).code
    known = written | {REQUEUE, EXIT_CODE, TIMED_OUT, interrupted, preempted}
    assert {0, 1, 2} <= written
    assert known == {0, 1, 2, 75, 124, 130}
    assert {str(code) for code in known} <= cells(page(repository, "exit-codes.md"))


def test_exit_codes_are_read() -> None:
    for code, found in (
        ("raise SystemExit(2) from None", "2"),
        ("raise typer.Exit(1)", "1"),
        ("    exit 7\n", "7"),
    ):
        assert [max(each) for each in EXIT.findall(code)] == [found]
