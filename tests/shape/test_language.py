"""The checker of words, and the limits on pages."""

from __future__ import annotations

from pathlib import Path

import check_language as checker

PAGE_WORDS, WORDS = 1500, 100_000


def found(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [line.removeprefix(f"{path}:") for line in checker.findings(path, checker.read_terms())]


def test_words_to_avoid_are_found_with_their_line(tmp_path: Path) -> None:
    page = (
        "# Title\n\nNobody knows `beside`.\n\n```\nbeside\n```\n\n"
        "It stands\nbeside [the door](beside.md).\n"
    )
    lines = found(tmp_path / "page.md", page)
    assert [line.split(": write")[0] for line in lines] == ["10: “beside”", "3: “Nobody”"]


def test_docstrings_messages_and_comments_are_read(tmp_path: Path) -> None:
    code = (
        '"""What runs first."""\n\nx = 1  # goes on for ever\n'
        'y = f"rank {x} is told\\nto stop"\nbeside = "beside"\n'
    )
    lines = found(tmp_path / "module.py", code)
    assert sorted(line.split(":")[0] for line in lines) == ["1", "3", "4"]


def test_sentences_that_begin_with_a_what_clause_are_found(tmp_path: Path) -> None:
    page = "What is read is kept. What is it? See what happens.\n\nWhat a save costs: see below.\n"
    assert len(found(tmp_path / "page.md", page)) == 2


def test_exceptions_of_a_term_hold(tmp_path: Path) -> None:
    assert found(tmp_path / "page.md", "The share of time that a rank waits.\n") == []


def count_words(page: str) -> int:
    """Count the words of a page; marks and lines of tables are none."""
    return sum(any(map(str.isalpha, word)) for word in page.split())


def test_no_page_is_longer_than_the_limit(repository: Path) -> None:
    folder = repository / "docs"
    long = {
        path.relative_to(folder).as_posix(): words
        for path in folder.rglob("*.md")
        if path.parts[-2] not in {"contributing", "design"}
        and (words := count_words(path.read_text())) > PAGE_WORDS
    }
    assert long == {}


def test_the_pages_together_are_no_longer_than_the_limit(repository: Path) -> None:
    """Every run of characters counts, also marks and cells of tables."""
    assert sum(len(path.read_text().split()) for path in (repository / "docs").rglob("*.md")) <= WORDS
