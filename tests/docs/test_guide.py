"""Every block of Python in the guide is run, page by page, and prints what the page says."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers import guide_pages as pages

FOLDER = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    path.relative_to(FOLDER).with_suffix("").as_posix(): path
    for path in sorted(FOLDER.rglob("*.md"))
    if path.parent != FOLDER / "design"
}
PROGRAMS = [name for name, path in PAGES.items() if pages.blocks(path.read_text())]
FIRST_PAGES = ("getting-started/", "guides/training-loop", "guides/data", "parallelism/choosing")
"""Pages that `make test` runs; `make test-rest` runs them all."""

TWICE = {"guides/training-loop"}
"""The pages that CI runs on two processes too; all in `make test-all`."""


def run_page(page: Path, capture: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__page__"}
    try:
        for block in pages.blocks(page.read_text()):
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            capture.readouterr()
            exec(code, names)
            printed = pages.without_progress(capture.readouterr().out)
            if block.printed is not None:
                assert printed == block.printed, f"{page.name}, line {block.line}"
    finally:
        world = names.get("world")
        names.clear()
        gc.collect()  # models that lie in reference cycles belong to this world
        if isinstance(world, shoal.World):
            world.close()


@pytest.mark.parametrize(
    "name",
    [
        name if name.startswith(FIRST_PAGES) else pytest.param(name, marks=pytest.mark.full(rows="all"))
        for name in PROGRAMS
    ],
)
def test_a_page_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        run_page(PAGES[name], capsys)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in TWICE else pytest.mark.long)
        for name in PROGRAMS
    ],
)
def test_a_page_runs_on_two_processes(name: str, tmp_path: Path) -> None:
    """The asserts of a page hold on two processes, and rank 0 prints the same."""
    page = PAGES[name]
    (tmp_path / "page.py").write_text(pages.program(page))
    said = pages.printed([sys.executable, "-m", "shoal", "run", "-n", "2", "page.py"], tmp_path)
    for block in pages.blocks(page.read_text()):
        assert (block.printed or "") in said


def test_the_guide_is_found() -> None:
    assert {"guides/data", "guides/checkpoints", "guides/training-loop"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PAGES)
def test_no_python_is_out_of_reach(name: str) -> None:
    text = PAGES[name].read_text()
    assert pages.unrun(text) == []
    for path in pages.included(text):
        assert (FOLDER.parent / path).is_file()


def test_blocks_are_read_with_their_lines_and_output() -> None:
    text = (
        "# Title\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n```\nshell\n```\n\n"
        "```python\ny = 2\n```\n\nBetween.\n\n```text\nnot its output\n```\n"
    )
    assert pages.blocks(text) == [
        pages.Block("x = 1\nprint(x)\n", 4, "1\n"),
        pages.Block("y = 2\n", 17, None),
    ]


def test_a_block_that_nobody_runs_is_named() -> None:
    one = '    ```python\n    --8<-- "docs/a.py"\n    ```\n'
    text = f'=== "tab"\n\n{one}\n    ```python\n    x = 1\n    ```\n'
    assert pages.unrun(text) == ["    x = 1"]
    assert pages.included(text) == ["docs/a.py"]
