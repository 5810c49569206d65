"""A real terminal for tests: a shell in tmux, what its screen shows, and all that it was sent."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from helpers.commands import wait_for

SHELL = "bash --norc --noprofile"


class Tmux:
    """A window of a server of its own, which ends with the test; its shell is in the folder."""

    def __init__(self, folder: Path, width: int, height: int, **variables: str) -> None:
        self.raw = folder / "raw"
        # Not in the folder, whose name may be too long for sockets.
        self._sockets = tempfile.TemporaryDirectory(prefix="shoal-")
        hidden = ("TMUX", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONSTARTUP")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment = {**kept, "LC_ALL": "C.UTF-8", **variables}
        size = ["-x", str(width), "-y", str(height)]
        term = variables.get("TERM", "screen-256color")
        inner = f"env TERM={term} {SHELL}"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-c", str(folder), *size, inner)
        self._tmux("set-option", "-g", "status", "off")
        self._tmux("pipe-pane", f"cat >> {shlex.quote(str(self.raw))}")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-S", f"{self._sockets.name}/tmux", *arguments]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=self._environment, timeout=30
        )
        return done.stdout

    def enter(self, text: str) -> None:
        """Type text, and Enter after it."""
        self._tmux("send-keys", "-l", text)
        self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key by tmux's name for it."""
        self._tmux("send-keys", key)

    def shoal(self, *arguments: str) -> None:
        """Type a `shoal` command."""
        self.enter(f"clear; {shlex.join([sys.executable, '-m', 'shoal', *arguments])}; echo code $?")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self) -> list[str]:
        """The lines of the screen."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def wrapped(self) -> bool:
        """Whether a line of the screen goes on in the next."""
        joined = self._tmux("capture-pane", "-p", "-J").split("\n")[:-1]
        return len(joined) != len(self.screen())

    def wait(self, shows: Callable[[list[str]], bool]) -> list[str]:
        """The screen, once it shows something."""
        seen: list[list[str]] = []

        def there() -> bool:
            seen[:] = [self.screen()]
            return shows(seen[0])

        try:
            wait_for(there)
        except TimeoutError:
            raise AssertionError("never shown; the screen is\n" + "\n".join(seen[0])) from None
        return seen[0]

    def written(self) -> bytes:
        """Everything that was sent to the terminal so far."""
        return self.raw.read_bytes()

    def __enter__(self) -> Tmux:
        self.wait(lambda screen: screen[0].strip() != "")  # the shell's prompt
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tmux("kill-server")
        self._sockets.cleanup()


def steps_in(screen: list[str]) -> int | None:
    """The step that a page of `shoal watch` says."""
    found = re.search(r"step ([\d,]+)", "\n".join(screen))
    return int(found[1].replace(",", "")) if found else None
