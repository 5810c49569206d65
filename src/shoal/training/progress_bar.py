"""The progress bar on rank 0: one line in a terminal, or lines at growing intervals in a log file."""

from __future__ import annotations

import atexit
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO, TypeAlias

from shoal.data import Loader
from shoal.distributed.world import World
from shoal.util.clock import CLOCK
from shoal.util.units import elapsed

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.text import Text

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 10.0
LOG_GROWTH = 0.02
"""A log file gets its next line after 2 % of the time so far: under 100 KB for a day."""

RATE_SECONDS = 10.0
"""The shortest time over which the throughput is averaged."""

BARS = (40, 20, 8)
"""Lengths of the bar; the longest that fits is drawn. A bar that filled the line would flicker."""

Part: TypeAlias = Literal["percent", "step", "epoch", "loss", "losses", "rate", "clock"]

KEPT: tuple[Part, ...] = ("percent", "loss", "clock", "epoch", "rate", "losses", "step")
"""The parts by priority in a line too narrow for all; the bar has priority over the last part only."""

SEPARATOR = " · "


class ProgressState(NamedTuple):
    """The progress of a run: positions in samples since the start, `rate` in samples/s over all ranks.

    `took` is the duration of the run in seconds, once it has ended.
    """

    step: int
    position: int
    goal: int | None
    epoch_size: int | None
    losses: Mapping[str, float]
    rate: float | None
    took: float | None = None

    def parts(self) -> dict[Part, str]:
        """Return the strings of the line, in their order."""
        losses = [f"{name} {value:.4g}" for name, value in self.losses.items()]
        parts: dict[Part, str | None] = {
            "percent": self._percent(),
            "step": f"step {self.step:,}",
            "epoch": self._epoch(),
            "loss": losses[0] if losses else None,
            "losses": SEPARATOR.join(losses[1:]) or None,
            "rate": self._throughput(),
            "clock": self._clock(),
        }
        return {name: text for name, text in parts.items() if text is not None}

    def _percent(self) -> str | None:
        if not self.goal:
            return None
        permille = min(1000, 1000 * self.position // self.goal)  # rounded down: 100 % is the end
        return "100 %" if permille == 1000 else f"{permille / 10:.1f} %"

    def _epoch(self) -> str:
        if self.epoch_size is None:
            return f"sample {self.position:,}"
        total = "" if self.goal is None else f"/{round(self.goal / self.epoch_size, 2):g}"
        return f"epoch {self.position / self.epoch_size:.2f}{total}"

    def _throughput(self) -> str | None:
        if self.rate is None:
            return None
        window = "" if self.took is None else "mean "
        return f"{window}{_number(self.rate)} samples/s"

    def _clock(self) -> str | None:
        if self.took is not None:
            return f"in {elapsed(self.took)}"
        if self.goal is None or not self.rate:
            return None
        return f"{elapsed(max(0, self.goal - self.position) / self.rate)} left"


class ProgressBar:
    """Shows the progress of a run on rank 0: `due` is called at every step, `show` only if it is due.

    In a terminal it is one line below all other output. In a log file, or if not `live`, it prints
    plain lines.
    """

    def __init__(self, stream: TextIO, *, live: bool = True) -> None:
        self._stream = stream
        self._line: Live | None = None
        self._terminal = live and stream.isatty()
        self._begun = CLOCK.wall()
        self._shown = self._due = 0.0
        self._marks: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    @classmethod
    def of(cls, world: World) -> ProgressBar | None:
        """Return a progress bar on stdout for rank 0, and None for other ranks or without stdout."""
        # Other launchers give rank 0 a terminal whose output may go into a file (mpirun).
        live = world.placement.launcher in ("none", "shoal run", "torchrun")
        return cls(sys.stdout, live=live) if world.is_rank_zero and sys.stdout else None

    def due(self, now: float) -> bool:
        """Return whether to show the line at `now`; cheap enough for every step."""
        return not self._shown <= now < self._due  # True as well if the clock was set back

    def show(self, step: int, loader: Loader, losses: Mapping[str, float], now: float) -> None:
        """Show step, epoch, losses, throughput and, if the loader has a goal, the remaining time."""
        self._mark(loader.position, now)
        rate = _rate(self._marks[0], self._marks[-1])
        standing = ProgressState(step, loader.position, loader.goal, loader.epoch_size, losses, rate)
        self._draw(standing)
        rarer = max(LOG_SECONDS, LOG_GROWTH * (now - self._begun))
        self._shown, self._due = now, now + (TERMINAL_SECONDS if self._terminal else rarer)

    def close(self, step: int, loader: Loader, losses: Mapping[str, float], now: float) -> None:
        """Print the last line, with the duration and the mean throughput; later output follows it.

        Does nothing if nothing was shown, or if called again.
        """
        if self._first is None:
            return
        rate = _rate(self._first, (now, loader.position))
        took = now - self._begun
        self._draw(
            ProgressState(step, loader.position, loader.goal, loader.epoch_size, losses, rate, took)
        )
        self._end()
        self._first = None

    def _mark(self, position: int, now: float) -> None:
        self._first = self._first or (now, position)
        self._marks.append((now, position))
        while len(self._marks) > 2 and self._marks[1][0] <= now - RATE_SECONDS:
            self._marks.popleft()

    def _draw(self, standing: ProgressState) -> None:
        if self._terminal and self._line is None:
            self._line = _live(self._stream)
            self._terminal = self._line is not None
            if self._line is not None:
                atexit.register(self._end)  # for a Run that is not closed
        if self._line is not None:
            self._line.update(_ProgressLine(standing), refresh=True)
        else:
            text = SEPARATOR.join(standing.parts().values())
            with suppress(OSError):  # a full disk must not stop training
                self._stream.write(_writable(text, self._stream.encoding) + "\n")
                self._stream.flush()

    def _end(self) -> None:
        if self._line is not None:
            atexit.unregister(self._end)
            sys.stdout.flush()  # rich would lose the beginning of a line
            sys.stderr.flush()
            self._line.stop()
            self._line = None


class _ProgressLine:
    """A Standing as rich draws it: on one line, at any width of the terminal."""

    def __init__(self, standing: ProgressState) -> None:
        self._standing = standing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.cells import cell_len
        from rich.text import Text

        width = options.max_width - 1  # a full line would wrap in some terminals
        parts = {
            name: _writable(text, options.encoding) for name, text in self._standing.parts().items()
        }
        room = width + len(SEPARATOR)
        kept = set()
        for name in KEPT:
            needs = cell_len(parts.get(name, "")) + len(SEPARATOR)
            if name == KEPT[-1] and self._standing.goal:
                needs += BARS[-1] + 1
            if name in parts and needs <= room:
                kept.add(name)
                room -= cell_len(parts[name]) + len(SEPARATOR)
        line = Text()
        if self._standing.goal and kept >= parts.keys() - {KEPT[-1]}:
            line.append(self._bar(next((bar for bar in BARS if bar < room), 0), console, options))
        for number, text in enumerate(text for name, text in parts.items() if name in kept):
            if number:
                line.append(_writable(SEPARATOR, options.encoding), "dim")
            line.append(text)
        yield line

    def _bar(self, length: int, console: Console, options: ConsoleOptions) -> Text:
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        text = Text()
        if length:
            bar = ProgressBar(
                total=self._standing.goal,
                completed=self._standing.position,
                width=length,
                style="dim",  # the terminal's own foreground: right on dark and on light
                complete_style="cyan",
                finished_style="green",
            )
            for segment in console.render(bar, options.update(width=length)):
                text.append(segment.text, segment.style)
            text.pad_right(length + 1 - text.cell_len)
        return text


def _live(stream: TextIO) -> Live | None:
    """Start rich's live line on a terminal; return None if it can't rewrite lines, as for TERM=dumb."""
    from rich.console import Console
    from rich.live import Live

    # All other output passes through this console, which must neither wrap nor interpret it.
    console = Console(file=stream, soft_wrap=True, markup=False, highlight=False, emoji=False)
    if console.is_dumb_terminal or not console.is_terminal:
        return None
    # Redirect stderr only if it is a terminal too, so that a log file gets its errors.
    live = Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
    live.start()
    console.show_cursor(True)  # a killed process could not bring it back
    return live


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float | None:
    seconds = end[0] - begin[0]
    return (end[1] - begin[1]) / seconds if seconds > 0 else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _writable(text: str, encoding: str | None) -> str:
    """Return `text` with `?` for each character that the encoding lacks."""
    return text.encode(encoding or "utf-8", "replace").decode(encoding or "utf-8")
