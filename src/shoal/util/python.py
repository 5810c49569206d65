"""The commands by which Shoal starts Python; no other module has them.

Such a Python imports nothing from the current directory, where a file may have the name of a module. A
user's script keeps its own directory, as under `python train.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def this_python() -> str:
    """Return the path of this interpreter."""
    return sys.executable


def code_command(code: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs the text of a program."""
    return [python, "-P", "-c", code, *arguments]


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs an installed module, as `python -m` does."""
    return [python, "-P", "-m", module, *arguments]


def script_command(script: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a script, which imports from its own directory."""
    return [python, script, *arguments]


def installed_shoal_command(*arguments: str, python: str) -> list[str]:
    """Return the command that runs the `shoal` of another interpreter; not `-P`, as below."""
    return [python, "-m", "shoal", *arguments]


def shoal_command(*arguments: str) -> list[str]:
    """Return the command that runs `shoal` with these arguments.

    Not `-P`, which ranks that it starts would have too.
    """
    return script_command(str(Path(__file__).parents[1] / "__main__.py"), *arguments)
