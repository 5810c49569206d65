"""The commands of the README, the quickstart and the tutorial print what the pages show."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from helpers.guide_pages import agrees, commands, printed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PAGES = ("README.md", "docs/getting-started/quickstart.md", "docs/getting-started/tutorial.md")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name == "README.md" else pytest.mark.long)
        for name in PAGES
    ],
)
def test_the_commands_print_what_the_page_shows(name: str, repository: Path, tmp_path: Path) -> None:
    page = (repository / name).read_text()
    scripts = re.findall(r"^```python\n(# train\.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for script in scripts:
        (tmp_path / "train.py").write_text(script)
    (tmp_path / "examples").symlink_to(repository / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = commands(page)
    assert found
    for command, shown in found:
        said = printed(["bash", "-c", command], tmp_path, PATH=path)
        assert agrees(shown, said), f"{command}\n{said}"


def test_the_readme_is_short(repository: Path) -> None:
    assert len((repository / "README.md").read_text().splitlines()) <= 150


def test_commands_are_read_with_their_output() -> None:
    page = "```console\n$ one  # comment\na\n$ two\n…\nb …\n```\n\n```\n$ three\n```\n"
    assert commands(page) == [("one", ["a"]), ("two", ["…", "b …"])]


def test_output_is_compared() -> None:
    for shown, said, same in (
        (["a"], "a\n", True),
        (["a", "b"], "a\nx\nb\n", True),
        (["…", "b …"], "a\nb 7\n", True),
        (["a 1"], "a 2\n", False),
        (["b", "a"], "a\nb\n", False),
        ([], "anything\n", True),
    ):
        assert agrees(shown, said) is same, shown
