from __future__ import annotations

import io
import itertools
import re

import pytest
import torch

import shoal
from shoal.progress import Progress, progress_line

DAY = 24 * 3600.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def loader(world: shoal.World) -> shoal.Loader:
    return shoal.Loader(torch.arange(1000), world, batch_size=10)


def test_the_line_says_where_the_run_stands() -> None:
    line = progress_line(1234, 2500, 1000, {"loss": 0.123456, "critic": 12345.6}, 98765.4)
    assert line == "step 1,234 · epoch 2.50 · loss 0.1235 · critic 1.235e+04 · 98,765 samples/s"
    assert progress_line(1, 10, 1000, {}, None) == "step 1 · epoch 0.01"
    assert progress_line(1, 1000, None, {}, None) == "step 1 · sample 1,000"


def test_a_log_of_a_day_stays_small(loader: shoal.Loader) -> None:
    log = io.StringIO()
    progress = Progress(log)
    begun = progress._begun
    shown = []
    losses = {"generator": 1.23456, "critic": 6.54321}
    for second in range(1, int(DAY)):
        if progress.due(begun + second):
            loader.load_state_dict(loader.state_dict() | {"position": second * 5000})
            progress.show(second * 500, loader, losses, begun + second)
            shown.append(second)
    progress.close()
    lines = log.getvalue().splitlines()
    assert len(lines) == len(shown)
    assert len(log.getvalue().encode()) < 50_000
    assert shown[0] <= 11
    gaps = [later - earlier for earlier, later in itertools.pairwise(shown)]
    assert max(gaps) < DAY / 20  # yet somebody who looks sees that it lives
    assert all("5,000 samples/s" in line for line in lines[1:])
    assert "\r" not in log.getvalue()


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_terminal_has_one_line_of_at_most_its_width(
    loader: shoal.Loader, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    progress = Progress(terminal)
    long, short = {"a name that takes all of the line": 1.0, "and more": 2.0}, {"loss": 1.0}
    for number, losses in enumerate((long, short)):
        progress.show(number, loader, losses, progress._begun + number)
    written = terminal.getvalue()
    assert "\n" not in written
    lines = re.split("\r", written)[1:]
    assert [len(line) for line in lines] == [columns - 1] * 2  # so the shorter covers the longer
    assert lines[1].startswith("step 1 · epoch")
    progress.close()
    progress.close()
    assert terminal.getvalue() == written + "\n"


def test_a_terminal_is_rewritten_at_most_twice_a_second(loader: shoal.Loader) -> None:
    progress = Progress(Terminal())
    begun = progress._begun
    shown = 0
    for tick in range(1000):
        if progress.due(begun + tick / 100):
            progress.show(tick, loader, {}, begun + tick / 100)
            shown += 1
    assert 10 <= shown <= 20


def test_throughput_counts_samples_since_the_last_line(loader: shoal.Loader) -> None:
    log = io.StringIO()
    progress = Progress(log)
    for second, position in ((10, 100), (20, 400), (40, 600)):
        loader.load_state_dict(loader.state_dict() | {"position": position})
        progress.show(second, loader, {}, progress._begun + second)
    lines = log.getvalue().splitlines()
    assert "samples/s" not in lines[0]
    assert lines[1].endswith("30 samples/s")
    assert lines[2].endswith("10 samples/s")
