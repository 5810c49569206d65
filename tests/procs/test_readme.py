"""What the README shows is run: its script, its own loop in it, alone and on two processes."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "shoal", "run", "-n", "2"]


def scripts(readme: str) -> dict[str, str]:
    """The script of the README, and the same with the loop of one's own in place of the step's."""
    whole, loop = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    given = re.search(r" *for batch in data.epochs\(10\):\n.*?(?= *run\.save)", whole, re.DOTALL)
    assert given is not None
    return {"step": whole, "own loop": whole.replace(given[0], textwrap.indent(loop, " " * 8))}


def last_line(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("which", ["step", "own loop"])
def test_the_script_gives_the_same_alone_on_two_processes_and_again(
    which: str, repository: Path, tmp_path: Path
) -> None:
    text = scripts((repository / "README.md").read_text())[which]
    ends = []
    for name, command in (("alone", ALONE), ("two", TWO)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        ends += [last_line(command, folder) for _ in range(2)]
    assert re.fullmatch(r"loss 0\.\d+, accuracy \d\d\.\d%", ends[0])
    assert len(set(ends)) == 1
