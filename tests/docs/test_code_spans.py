"""Code in running text uses keyword arguments that exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import shoal


def calls(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the public names that the code spans of a page call, with the keywords they pass."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`\n]+)`", prose):
        try:
            tree = ast.parse(span.replace("…", "..."))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("shoal.")
                if name in shoal.__all__:
                    yield name, {word.arg for word in node.keywords if word.arg}


def unknown(text: str) -> list[str]:
    return [
        f"{name}({word}=)"
        for name, words in calls(text)
        for word in sorted(words - set(inspect.signature(getattr(shoal, name)).parameters))
    ]


def test_keywords_in_running_text_exist(repository: Path) -> None:
    pages = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    kept = [page for page in pages if page.name != "CHANGELOG.md"]
    assert {str(page): found for page in kept if (found := unknown(page.read_text()))} == {}


def test_unknown_keywords_are_found() -> None:
    for text, found in (
        ("`shoal.DDP(bucket_cap_mb=50)` and `Loader(…, batch_size=4)`", []),
        ("`shoal.DDP(bucket=50)`", ["DDP(bucket=)"]),
        ("`[Loader(…, batch=4), 1]` and `not code(`", ["Loader(batch=)"]),
    ):
        assert unknown(text) == found
