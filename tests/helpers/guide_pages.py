"""The pages of the guide as programs: their Python blocks in order, and what they say is printed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRESS = re.compile(r"[\d.]+ % · step ")
INCLUDED = "--8<--"


class Block(NamedTuple):
    """A block of Python, the line of the page that it begins at, what it prints if the page says so."""

    code: str
    line: int
    printed: str | None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page; a `text` block after one, with nothing between, is its output."""
    found: list[Block] = []
    end = -1
    for fence in FENCE.finditer(page):
        language, body = fence.groups()
        if language == "python":
            found.append(Block(body, page.count("\n", 0, fence.start()) + 2, None))
            end = fence.end()
        elif language == "text" and found and page[end : fence.start()].strip() == "":
            found[-1] = found[-1]._replace(printed=body)
    return found


def unrun(page: str) -> list[str]:
    """The first lines of Python blocks that `blocks` does not see and that include no file."""
    opened = re.findall(r"^( *)```python\n(.*)$", page, re.MULTILINE)
    return [line for indent, line in opened if indent and INCLUDED not in line]


def included(page: str) -> list[str]:
    """The files that a page includes."""
    return re.findall(rf'^ *{INCLUDED} "([^"]+)"$', page, re.MULTILINE)


def program(page: Path) -> str:
    """All blocks as one script, at the lines where they stand in the page."""
    lines: list[str] = []
    for block in blocks(page.read_text()):
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def without_progress(printed: str) -> str:
    """What a script itself printed: the lines of a Run tell of speeds, which are never the same."""
    return "".join(line for line in printed.splitlines(keepends=True) if not PROGRESS.match(line))


def printed(command: Sequence[str | Path], folder: Path | None = None, **variables: str) -> str:
    """What a command prints in a folder, with these variables; it ends without an error."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return each command of the console blocks of a page with the lines it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in CONSOLE.findall(page):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ ").split("  #")[0].strip(), []))
            else:
                found[-1][1].append(line)
    return found


def agrees(shown: list[str], printed: str) -> bool:
    """Return whether a page shows the output: `…` stands for any text, alone for any lines."""
    parts = [
        "(?s:.*)" if line == "…" else r"[^\n]*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in shown
    ]
    return not shown or re.search("(?s:.*)".join(parts), printed) is not None
