"""`shoal watch` in a real terminal, on runs that real processes are writing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest

from helpers.commands import Command, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.system, pytest.mark.realtime]

TRAINING = """
import sys, time
import torch
import shoal

with shoal.init(seed=0) as world:
    model = shoal.parallelize(torch.nn.Linear(4, 1), world)
    step = shoal.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        shoal.Task(lambda output, batch: ((output - 1).square().sum(), len(output)), lambda b: b[0]),
    )
    data = shoal.Loader(torch.utils.data.TensorDataset(torch.ones(640, 4)), world, batch_size=64)
    with shoal.Run(sys.argv[1], step, data, trackers=()) as run:
        run.restore()
        for batch in data.epochs(10**6):
            time.sleep(0.02)
            step(batch)
            run.tick(every=100)
"""

WRITING = """
import sys, time
from pathlib import Path

sys.path.append(sys.argv[2])
from helpers import synthetic_runs as histories

folder = Path(sys.argv[1], "events")
folder.mkdir(parents=True)
histories.BLOCK = 8
plant = histories.Plant(part="wait", ranks=[40], seconds=8e-3, since=50)
parts = histories.simulate(64, 4000, [plant])
began = time.time()
files = [(folder / f"rank-{rank}.jsonl").open("w") for rank in range(64)]
for lines in zip(*(histories.lines(parts, rank, began=began) for rank in range(64))):
    for file, line in zip(files, lines):
        file.write(line + "\\n")
        file.flush()
    time.sleep(0.2)
"""
ERASED = re.compile(rb"\x1b\[[0-3]?[JK]")
BEGIN, END = b"\x1b[?2026h", b"\x1b[?2026l"


SHELL = "bash --norc --noprofile"

Start = Callable[[str, Path], Command]


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


@pytest.fixture
def start(start_command: Callable[..., Command]) -> Start:
    """Starts what writes the events of a run."""
    tests = str(Path(__file__).parents[1])
    return lambda script, run: start_command([sys.executable, "-c", script, str(run), tests])


def frames(written: bytes) -> list[bytes]:
    """What was drawn between leaving and taking back the ordinary screen, frame by frame."""
    page = written.rpartition(b"\x1b[?1049h")[2].partition(b"\x1b[?1049l")[0]
    return page.split(BEGIN)[1:]


def check_drawn_quietly(written: bytes, least: int) -> None:
    """No frame clears anything; each begins at the top left corner and is shown as a whole."""
    drawn = frames(written)
    assert len(drawn) >= least
    for frame in drawn:
        assert ERASED.search(frame) is None
        assert frame.startswith(b"\x1b[1;1H")
        assert frame.endswith(END)


def fills(height: int, last: str, screen: list[str]) -> bool:
    """Whether the page's first and last line are the screen's: a line that wrapped would push them."""
    return len(screen) == height and "a · running" in screen[0] and screen[-1].startswith(last)


def test_a_training_from_before_it_begins_until_it_is_preempted(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "a"
    with Tmux(tmp_path, 80, 24) as terminal:
        terminal.enter("stty -g > before; echo here")
        terminal.shoal("watch", str(run))
        terminal.wait(lambda screen: "there is no such directory" in "\n".join(screen))
        training = start(TRAINING, run)
        screen = terminal.wait(lambda screen: (steps_in(screen) or 0) > 100)
        first = steps_in(screen)
        assert first is not None
        assert screen[-1].startswith("q quit")
        assert max(map(len, screen)) <= 80
        assert "running" in screen[0]
        screen = terminal.wait(lambda screen: (steps_in(screen) or 0) > first)
        for words in ("loss", "throughput", "samples/s", "% ·", "epoch", "left", "D data", "saved"):
            assert words in "\n".join(screen)
        assert not terminal.wrapped()
        check_drawn_quietly(terminal.written(), 5)
        training.process.terminate()
        # The launcher tells both ranks; either may be the first to ask for the end.
        told = re.compile("by SIGTERM on rank [01]")
        terminal.wait(
            lambda screen: "preempted" in "\n".join(screen[:2]) and any(map(told.search, screen))
        )
        terminal.press("q")
        screen = terminal.wait(lambda screen: any(line == "code 0" for line in screen))
        assert not any("throughput" in line for line in screen)
        terminal.enter("stty -g > after; cmp before after && echo the same")
        terminal.wait(lambda screen: "the same" in screen)
    assert training.end().code == 75


def test_many_ranks_on_a_large_terminal_that_is_resized(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "a"
    start(WRITING, run)
    with Tmux(tmp_path, 200, 50) as terminal:
        terminal.shoal("watch", str(run))
        screen = terminal.wait(lambda screen: "slowest and" in "\n".join(screen))
        assert screen[-1].startswith("q quit · ↑ ↓")
        screen = terminal.wait(lambda screen: any(line.startswith("▸40 node20 D") for line in screen))
        assert "64 ranks on 32 hosts" in screen[0]
        assert max(map(len, screen)) <= 200
        assert not terminal.wrapped()
        terminal.press("Down")
        terminal.wait(lambda screen: any(line.startswith("ranks 0 to ") for line in screen))
        terminal.press("Home")
        terminal.wait(lambda screen: "slowest and" in "\n".join(screen))
        for width, height in ((80, 24), (40, 12), (120, 40)):
            terminal.resize(width, height)
            last = "q quit" if height >= 14 else "saved"
            terminal.wait(partial(fills, height, last))
        check_drawn_quietly(terminal.written(), 5)
        terminal.press("C-c")
        terminal.wait(lambda screen: any("code 130" in line for line in screen))


def test_put_aside_and_taken_up_again(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "a"
    start(WRITING, run)
    with Tmux(tmp_path, 80, 24, NO_COLOR="1") as terminal:
        terminal.shoal("watch", str(run))
        terminal.wait(lambda screen: "slowest and" in "\n".join(screen))
        terminal.press("C-z")
        terminal.wait(lambda screen: "Stopped" in "\n".join(screen))
        terminal.enter("fg")
        # A screen may be seen while it is drawn, so all of it is waited for.
        terminal.wait(
            lambda screen: "slowest and" in "\n".join(screen) and any("DFFF" in row for row in screen)
        )
        terminal.press("C-\\")
        terminal.wait(lambda screen: "slowest and" not in "\n".join(screen))
        drawn = b"".join(frames(terminal.written()))
        assert re.search(rb"\x1b\[[0-9;]*[34][0-9]", drawn) is None


def test_a_dumb_terminal_gets_one_plain_page(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "a"
    start(WRITING, run)
    with Tmux(tmp_path, 80, 40, TERM="dumb") as terminal:
        terminal.shoal("watch", str(run), "--every", "0.5")
        terminal.wait(lambda screen: (steps_in(screen) or 0) > 30)
        terminal.press("C-c")
        terminal.wait(lambda screen: any("code 130" in line for line in screen))
        terminal.enter("clear")
        terminal.shoal("watch", str(run))
        screen = terminal.wait(lambda screen: any(line == "code 0" for line in screen))
        assert any("slowest and" in line for line in screen)
        assert b"\x1b[?1049h" not in terminal.written()
