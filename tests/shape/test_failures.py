"""Each row of docs/explanation/failures.md, a failure of other tools, is held by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import rules


def named(text: str) -> set[int]:
    """The rows that a text names: the word FAILURES and their numbers, with commas between."""
    lists = re.findall(r"FAILURES (\d+(?:, \d+)*)", text)
    return {int(row) for numbers in lists for row in numbers.split(", ")}


def rows(document: str) -> set[int]:
    """The numbers of the rows of a table."""
    return {int(row) for row in re.findall(r"^\| (\d+) \|", document, re.MULTILINE)}


def docstrings(folder: Path) -> Iterator[str]:
    """What tests say of themselves, and modules of theirs."""
    for path in sorted(folder.glob("*/test_*.py")):
        module = rules.parsed(path.read_text())
        for node in (module, *module.body):
            if isinstance(node, ast.Module | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def test_every_row_has_a_test_that_names_it_and_every_test_a_row(repository: Path) -> None:
    promised = rows((repository / "docs" / "explanation" / "failures.md").read_text())
    found = {row for text in docstrings(repository / "tests") for row in named(text)}
    assert sorted(promised - found) == []
    assert sorted(found - promised) == []


def test_rows_are_read() -> None:
    assert named("FAILURES 4: one\nFAILURES 19, 20. FAILURES of none 7") == {4, 19, 20}
    assert rows("| | |\n|---|---|\n| 4 | a word |\n| 20 | 7 |\nno | 9 | row\n") == {4, 20}


def test_docstrings_of_modules_and_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    text = '"""A module.\n\nAnd more."""\n\nx = """no\n"""\n\n\ndef test() -> None:\n    """One."""\n'
    (tmp_path / "cpu" / "test_x.py").write_text(text)
    assert list(docstrings(tmp_path)) == ["A module.\n\nAnd more.", "One."]
