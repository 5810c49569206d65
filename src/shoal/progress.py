"""One progress line on rank 0: rewritten in a terminal, ever rarer lines in a log file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TextIO

from shoal.data import Loader

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 10.0
LOG_GROWTH = 0.02
"""A log gets its next line after 2 % of the time so far: under 50 KB for a day."""


class Progress:
    """Where the run stands, in one line of at most the terminal's width."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._begun = time.time()
        self._shown = self._begun
        self._position: int | None = None
        self._open = False

    def due(self, now: float) -> bool:
        """Whether the line would be shown at `now`; cheap enough for every step."""
        wait = TERMINAL_SECONDS if self._terminal else self._log_seconds(now)
        return now - self._shown > wait

    def show(self, step: int, loader: Loader, losses: Mapping[str, float], now: float) -> None:
        """Show step, epoch, losses and throughput since the last time."""
        text = progress_line(step, loader.position, loader.epoch_size, losses, self._rate(loader, now))
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + text[:width].ljust(width))
            self._open = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self._shown = now
        self._position = loader.position

    def close(self) -> None:
        """End the line, so that what follows starts on one of its own."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def _rate(self, loader: Loader, now: float) -> float | None:
        if self._position is None or now <= self._shown:
            return None
        return (loader.position - self._position) / (now - self._shown)

    def _log_seconds(self, now: float) -> float:
        return max(LOG_SECONDS, LOG_GROWTH * (now - self._begun))


def progress_line(
    step: int, position: int, epoch_size: int | None, losses: Mapping[str, float], rate: float | None
) -> str:
    """The text of the line; `rate` in samples per second over all ranks."""
    parts = [f"step {step:,}"]
    if epoch_size is None:
        parts.append(f"sample {position:,}")
    else:
        epoch, offset = divmod(position, epoch_size)
        parts.append(f"epoch {epoch + offset / epoch_size:.2f}")
    parts += [f"{name} {value:.4g}" for name, value in losses.items()]
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    return " · ".join(parts)
