"""The progress of an audit: a line for each run and decided property, and the step on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.tools.verify.operations import PropertyFinding
from shoal.util.clock import CLOCK
from shoal.util.safe_text import printable
from shoal.util.tables import print_path

STEP = b'{"event": "step",'
"""How the record of a step begins."""


class VerifyProgress:
    """Lines on a console, with one that is rewritten for each step if it is a terminal.

    Use it as a context, which ends this line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._run, self._of, self._begun = "", "", 0.0
        self._read: dict[Path, int] = {}
        self._taken = 0

    def __enter__(self) -> VerifyProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def run_starts(self, name: str, steps: int, *, restarted: bool = False) -> None:
        """Show the name of a run of at most this many steps; those of a restart begin at 1 again."""
        self._run = f"{name}, restarted" if restarted else name
        self._of = f"{steps} after the restart" if restarted else f"{steps}"
        self._begun = CLOCK.now()
        print_path(self._console, f"running: {self._run}")

    def look(self, folder: Path) -> None:
        """Show how many steps rank 0 has recorded in a directory, on a terminal."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        if not any(path.parent == folder for path in self._read):
            self._read, self._taken = {}, 0
        for path in folder.glob("rank-0.*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(new + newline)
            self._taken += new.count(STEP)
        seconds = CLOCK.now() - self._begun
        line = f"{self._run}: step {self._taken} of {self._of}, {seconds:.0f} s"
        self._live.start()
        self._console.show_cursor(True)  # a killed process could not bring it back
        self._live.update(Text(printable(line), no_wrap=True, overflow="ellipsis"), refresh=True)

    def decided(self, finding: PropertyFinding) -> None:
        """Show the answer for a property."""
        evidence = f" ({finding.evidence})" if finding.verdict != "held" and finding.evidence else ""
        line = Text(printable(f"{finding.name}: {finding.answer}{evidence}"))
        self._console.print(line, soft_wrap=not self._console.is_terminal)
