"""The pages of the command line are those that their script writes today."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
import write_cli_reference as script

from helpers.cli import refused
from shoal.cli.main import app


def test_the_committed_pages_are_those_of_the_script(repository: Path) -> None:
    pages = script.pages()
    for name, text in pages.items():
        committed = (repository / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"run: python scripts/write_cli_reference.py ({name})"
    folder = repository / "docs" / "reference" / "cli"
    assert {f"cli/{path.name}" for path in folder.iterdir()} | {"cli.md"} == set(pages)


def test_every_command_and_option_has_its_place() -> None:
    text = "\n".join(script.pages().values())
    rest = [("shoal", typer.main.get_command(app))]
    seen = 0
    for path, command in rest:
        commands = getattr(command, "commands", {})
        rest += [(f"{path} {name}", each) for name, each in commands.items()]
        if commands:
            continue
        seen += 1
        section = text.split(f"\n## {path}\n")[1].split("\n## ")[0]
        for param in command.params:
            for name in (*param.opts, *param.secondary_opts):
                assert f"`{name if name.startswith('-') else param.metavar or name.upper()}`" in section
        for example in (command.epilog or "").splitlines()[1:]:
            assert example.strip() in section
    assert seen > 20


def test_the_pages_are_in_the_navigation(repository: Path) -> None:
    navigation = (repository / "mkdocs.yml").read_text()
    assert [name for name in script.pages() if f"reference/{name}" not in navigation] == []


def test_a_default_in_words_is_read() -> None:
    for text, description, default in (
        ("Port to use (default: a free port).", "Port to use.", "a free port"),
        ("Print it.", "Print it.", ""),
    ):
        assert script.split_default(text) == (description, default)


def test_the_example_of_an_error_is_what_the_command_says(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    told = str(refused("run", "--nproc", "0", "train.py"))
    assert f"$ shoal run --nproc 0 train.py{told}\n```" in (
        repository / "docs" / "reference" / "cli.md"
    ).read_text(encoding="utf-8")
