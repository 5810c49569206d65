"""Report words that Shoal's texts avoid: `python scripts/check_language.py [FILE ...]`.

The words, with their replacements, are in docs/contributing/terms.toml. Without files, check the
README, the documentation, and the packages whose docstrings, comments and messages are rewritten.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TERMS = ROOT / "docs" / "contributing" / "terms.toml"
CHECKED = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/**/*.py",
    "examples/*.md",
    "examples/*.py",
    "scripts/**/*.py",
    "src/**/*.py",
)
UNCHECKED = {"CHANGELOG.md", "style.md"}
"""Files that name the words they replace."""


class Term(NamedTuple):
    """An expression to avoid, its replacement, and the phrases in which it is right."""

    avoid: re.Pattern[str]
    use: str
    allow: tuple[re.Pattern[str], ...]


class Passage(NamedTuple):
    """Text that people read, and the line of its file on which it begins."""

    line: int
    text: str


def read_terms(path: Path = TERMS) -> list[Term]:
    """Return the terms of a TOML file."""
    found = []
    for row in tomllib.loads(path.read_text())["term"]:
        start = r"(?:\A|(?<=[.!?:;]\s)|(?<=\n\n))" if row.get("sentence_start") else r"(?<![\w-])"
        avoid = re.compile(f"{start}(?:{row['avoid']})", re.IGNORECASE)
        allow = tuple(re.compile(phrase, re.IGNORECASE) for phrase in row.get("allow", ()))
        found.append(Term(avoid, row["use"], allow))
    return found


def passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a Markdown page or a Python file."""
    text = path.read_text()
    if path.suffix == ".md":
        fence = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
        yield Passage(1, _without_code(fence.sub(lambda block: "\n" * block[0].count("\n"), text)))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], _without_code(token.string.lstrip("#! ")))
    yield from _strings(ast.parse(text))


def _strings(tree: ast.AST) -> Iterator[Passage]:
    """Yield the strings of a module that have several words, f-strings with `…` for their values."""
    parts = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            text = "".join(str(value) for value in values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if text.count(" ") > 1:
            yield Passage(node.lineno, _without_code(text))


def _without_code(text: str) -> str:
    """Blank code, link targets and HTML tags, and keep all line breaks."""
    text = re.sub(r"``[^`]+``|`[^`]+`", lambda code: "`" + "\n" * code[0].count("\n") + "`", text)
    return re.sub(r"\]\([^)]*\)|<[a-z/][^>]*>", "", text)


def findings(path: Path, terms: list[Term]) -> Iterator[str]:
    """Yield one line for each place where a file uses an avoided word."""
    for passage in passages(path):
        flat = re.sub(r"(?<!\n)\n(?!\n)", " ", passage.text)
        for term in terms:
            for match in term.avoid.finditer(flat):
                near = flat[max(0, match.start() - 40) : match.end() + 40]
                if any(phrase.search(near) for phrase in term.allow):
                    continue
                line = passage.line + passage.text.count("\n", 0, match.start())
                words = " ".join(match[0].split()[:6])
                yield f"{path}:{line}: “{words}”: write {term.use}"


def main(arguments: list[str]) -> int:
    """Print what the files use of the avoided words; return 1 if there is any."""
    paths = [Path(name) for name in arguments] or sorted(
        path for pattern in CHECKED for path in ROOT.glob(pattern) if path.name not in UNCHECKED
    )
    terms = read_terms()
    found = [line for path in paths for line in findings(path, terms)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
