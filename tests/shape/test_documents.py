from __future__ import annotations

from pathlib import Path

import pytest

from helpers import rules

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/contributing/architecture.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(repository: Path, document: str) -> None:
    known = rules.targets((repository / "Makefile").read_text())
    text = (repository / document).read_text()
    assert list(rules.unknown_targets(text, known)) == []


def test_every_path_in_the_readme_exists(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    assert list(rules.missing_paths(text, repository)) == []


def test_targets_are_read_from_the_makefile() -> None:
    makefile = "PY := python\nVENV:=x\n.PHONY: demo\ndemo: venv ## words\n\ttest: x\ntest-all: demo\n"
    assert rules.targets(makefile) == {"demo", "test-all"}


def test_unknown_targets_are_named() -> None:
    document = (
        "To make sure, run `make PYTHON=/bin/x demo`, `make test nothing`:\n"
        "```\nmake tset-all  # all\n```\n"
    )
    found = list(rules.unknown_targets(document, {"demo", "test"}))
    assert found == ["make nothing", "make tset-all"]


def test_missing_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "here.md").write_text("")
    document = (
        "`docs/here.md` and `docs/gone.md`, [linked](docs/lost.md#part), `NOTES.md`; but neither "
        "`train.py` nor `replicate/shard`, `runs/a`, `shoal run -n 4`, <https://docs/x.md> "
        "or [a site](https://example.org/y.md)"
    )
    found = list(rules.missing_paths(document, tmp_path))
    assert found == ["docs/gone.md", "NOTES.md", "docs/lost.md"]
