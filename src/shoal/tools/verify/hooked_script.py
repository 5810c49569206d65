"""A script whose ranks set hooks before it starts. An order in a file describes it.

The order has the script, its arguments, the number of ranks and restarts, and the hooks: the place of a
function, as `module:function`, and the options that it gets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.launcher.entry_point import Script
from shoal.launcher.local import run_job

START = "from shoal.tools.verify.hooked_script import main; main()"
"""Not `-m`: ranks must find its classes under the module's name, not under `__main__`."""


@dataclass(frozen=True, kw_only=True)
class HookedScript:
    """A script that a rank runs under hooks."""

    path: str
    args: tuple[str, ...]
    hooks: str
    options: Mapping[str, Any]
    safe_path: bool = False

    @property
    def name(self) -> str:
        """The script's name in messages."""
        return self.path

    def run(self) -> None:
        """Set the hooks and run the script as `__main__`."""
        module, _, function = self.hooks.partition(":")
        getattr(import_module(module), function)(self.options)
        Script(path=self.path, args=self.args).run()


def order_command(order: Mapping[str, Any], file: Path, **variables: str) -> list[str]:
    """Write an order to a file, and return the command that runs it with these variables."""
    file.write_text(json.dumps(order), encoding="utf-8")
    # `env` sets them before Python starts, and leaves this process's environment alone.
    named = (f"{name}={value}" for name, value in variables.items())
    return ["env", *named, sys.executable, "-c", START, str(file)]


def read_order(file: Path) -> tuple[HookedScript, int, int]:
    """Return the script of an order, and its numbers of ranks and of restarts."""
    order = json.loads(file.read_text(encoding="utf-8"))
    processes, restarts = order.pop("processes"), order.pop("restarts", 0)
    return HookedScript(**{**order, "args": tuple(order["args"])}), processes, restarts


def main() -> None:
    """Run the order of the first argument, as `shoal run` does, and exit with the code of its ranks."""
    job, processes, restarts = read_order(Path(sys.argv[1]))
    sys.exit(run_job(job, processes=processes, restarts=restarts).code)
