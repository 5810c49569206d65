from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte
import pytest
import torch

import shoal
from helpers.ranks import Ranks
from helpers.small_training import step_of
from shoal.training.progress_bar import ProgressBar, ProgressState
from shoal.util.units import elapsed

DAY = 24 * 3600.0


@pytest.fixture
def loader(world: shoal.World) -> shoal.Loader:
    return shoal.Loader(torch.arange(1000), world, batch_size=10)


def move(loader: shoal.Loader, position: int) -> None:
    loader.load_state_dict(loader.state_dict() | {"position": position})


def test_the_parts_say_where_the_run_stands() -> None:
    losses = {"loss": 0.123456, "critic": 12345.6}
    standing = ProgressState(1234, 2500, 10_000, 1000, losses, 500.0)
    assert standing.parts() == {
        "percent": "25.0 %",
        "step": "step 1,234",
        "epoch": "epoch 2.50/10",
        "loss": "loss 0.1235",
        "losses": "critic 1.235e+04",
        "rate": "500 samples/s",
        "clock": "0:15 left",
    }
    assert ProgressState(1, 10, None, 1000, {}, 1.5).parts() == {
        "step": "step 1",
        "epoch": "epoch 0.01",
        "rate": "1.5 samples/s",
    }
    assert ProgressState(1, 1000, None, None, {}, None).parts()["epoch"] == "sample 1,000"
    percents = {0: "0.0 %", 9_999: "99.9 %", 10_000: "100 %", 10_001: "100 %"}
    for position, percent in percents.items():
        assert ProgressState(1, position, 10_000, 1000, {}, None).parts()["percent"] == percent


def test_durations() -> None:
    texts = {-5: "0:00", 59.6: "1:00", 754: "12:34", 12345: "3:25:45", 357_900: "4d 03:25"}
    assert {seconds: elapsed(seconds) for seconds in texts} == texts


def test_a_log_of_a_day_stays_small(loader: shoal.Loader) -> None:
    """FAILURES 29: under 100 KB, the first line at the first step, and never silent for long."""
    log = io.StringIO()
    progress = ProgressBar(log)
    begun = progress._begun
    loader.goal = int(DAY) * 5000
    shown = []
    losses = {"generator": 1.23456, "critic": 6.54321}
    for second in range(1, int(DAY)):
        if progress.due(begun + second):
            move(loader, second * 5000)
            progress.show(second * 500, loader, losses, begun + second)
            shown.append(second)
    move(loader, loader.goal)
    progress.close(int(DAY) * 500, loader, losses, begun + DAY)
    lines = log.getvalue().splitlines()
    assert len(lines) == len(shown) + 1
    assert len(log.getvalue().encode()) < 100_000
    assert shown[0] == 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(shown)]
    assert max(gaps) < DAY / 20  # yet somebody who looks sees that it lives
    assert all("5,000 samples/s" in line for line in lines[1:])
    assert all(" left" in line for line in lines[1:-1])
    assert lines[-1].startswith("100 %")
    assert lines[-1].endswith("in 1d 00:00")
    assert "\r" not in log.getvalue()


def test_throughput_is_that_of_the_last_ten_seconds_or_since_the_last_line(
    loader: shoal.Loader,
) -> None:
    log = io.StringIO()
    progress = ProgressBar(log)
    for second, position in ((10, 100), (14, 400), (18, 900), (28, 1000), (48, 1400)):
        move(loader, position)
        progress.show(second, loader, {}, progress._begun + second)
    rates = [re.findall(r"(\S+) samples/s", line) for line in log.getvalue().splitlines()]
    assert rates == [[], ["75"], ["100"], ["10"], ["20"]]


def test_a_clock_that_is_set_back_keeps_the_line_from_nobody(loader: shoal.Loader) -> None:
    progress = ProgressBar(io.StringIO())
    now = progress._begun + 3600
    progress.show(1, loader, {}, now)
    assert not progress.due(now + 1)
    assert progress.due(now - 1800)


def test_a_log_that_lacks_a_letter_is_no_reason_to_stop(loader: shoal.Loader) -> None:
    written = io.BytesIO()
    progress = ProgressBar(io.TextIOWrapper(written, encoding="ascii"))
    progress.show(1, loader, {"étape": 0.5}, progress._begun + 1)
    assert b"0.5" in written.getvalue()


SCRIPT = """
import sys, torch, shoal, shoal.training.progress_bar
from pathlib import Path

shoal.training.progress_bar.TERMINAL_SECONDS = 0.0  # every step is shown
mode = sys.argv[2]
with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(2, 1), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    data = shoal.Loader((torch.ones(100, 2),), world, batch_size=10)
    run = shoal.Run(sys.argv[1], step, data, trackers=())
    run.__enter__() if mode == "unclosed" else None
    try:
        for batch in data.epochs(10**9 if mode == "forever" else 4):
            step(batch)
            run.tick()
            if run.step == 10:
                print("[bold]a print that is a good deal longer than a narrow terminal is wide[/bold]")
                world.print("said at step 10")
                print("to stderr", file=sys.stderr)
            if run.step == 30 and mode == "raises":
                raise LookupError("what a user raises")
        print("cut off", end="")
    finally:
        if mode != "unclosed":
            run.close()
    print(" and ended")
"""
PRINTED = [
    "[bold]a print that is a good deal longer than a narrow terminal is wide[/bold]",
    "said at step 10",
    "to stderr",
]


LINES = 50
SECONDS = 120.0


@dataclass(frozen=True)
class Shown:
    """How a command ended, every screen that was seen on the way, and the last one, without blanks."""

    code: int
    screens: list[list[str]]
    written: bytes
    cursor: tuple[int, bool]
    """Its column, and whether it is visible."""

    @property
    def last(self) -> list[str]:
        return self.screens[-1]


def on_terminal(
    command: Sequence[str],
    columns: int,
    *,
    variables: dict[str, str] | None = None,
    react: Callable[[subprocess.Popen[bytes], list[str]], None] | None = None,
) -> Shown:
    """Run `command` on a terminal; `react` is told of each screen while it runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    hidden = {"NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = kept | {"TERM": "xterm-256color"} | (variables or {})
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    screens, written = [_text(screen)], b""
    deadline = time.monotonic() + SECONDS
    try:
        while piece := _read(ours, deadline):
            written += piece
            for drawn in re.split(rb"(?=\r)", piece):  # one line at a time, however many came together
                stream.feed(drawn)
                screens.append(_text(screen))
            if react is not None:
                react(process, screens[-1])
        code = process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return Shown(code, screens, written, (screen.cursor.x, not screen.cursor.hidden))


def _read(terminal: int, deadline: float) -> bytes:
    """What comes next; nothing once the other side is closed."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
    assert ready, f"nothing was written in {SECONDS} s, and nothing has ended"
    try:
        return os.read(terminal, 4096)
    except OSError:  # what Linux answers there
        return b""


def _text(screen: pyte.Screen) -> list[str]:
    return [line.rstrip() for line in screen.display if line.strip()]


def terminal(tmp_path: Path, columns: int, mode: str = "", **given: object) -> Shown:
    tmp_path.mkdir(exist_ok=True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "run"), mode]
    return on_terminal(command, columns, **given)  # type: ignore[arg-type]


def bars(screen: list[str]) -> list[str]:
    return [line for line in screen if "% ·" in line]


@pytest.mark.full
@pytest.mark.parametrize("columns", [80, 30, 160])
def test_a_terminal_has_one_line_below_all_else(tmp_path: Path, columns: int) -> None:
    """FAILURES 29: one line, rewritten, at any width; what is printed meanwhile stands above it."""
    shown = terminal(tmp_path, columns)
    assert shown.code == 0
    assert all(len(bars(screen)) <= 1 for screen in shown.screens)
    assert len({line for screen in shown.screens for line in bars(screen)}) > 10  # it moves
    (line,) = bars(shown.last)
    above, below = "".join(shown.last).split(line)
    assert above == "".join([*PRINTED, "cut off"])
    assert below == " and ended"
    assert "100 % · " in line
    assert "loss " in line
    assert shown.cursor == (0, True)
    if columns >= 80:
        assert re.search(r"epoch 4\.00/4 · loss \S+ · mean \S+ samples/s · in \d:\d\d$", line)
    assert line.startswith("━") == (columns >= 80)


@pytest.mark.full
def test_without_color_the_bar_is_as_long_as_the_way_gone(tmp_path: Path) -> None:
    plain = terminal(tmp_path, 160, variables={"NO_COLOR": "1"})
    color = re.compile(rb"\x1b\[[\d;]*[34]\d")
    assert not color.search(plain.written)
    seen = {line.split(" ·")[0] for screen in plain.screens for line in bars(screen)}
    assert len(seen) > 10
    for bar, percent in (re.split(r" +", text.removesuffix(" %")) for text in seen):
        assert len(bar) == pytest.approx(0.4 * float(percent), abs=1)
    assert color.search(terminal(tmp_path / "again", 160).written)


OF_MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": text
    for name, text in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1"))
}


@pytest.mark.full(rows="all")
@pytest.mark.parametrize(
    ("variables", "code"),
    [({"TERM": "dumb"}, b"\x1b"), (OF_MPIRUN | {"PMIX_NAMESPACE": "job"}, b"\x1b[2K")],
)
def test_a_terminal_that_can_not_rewrite_or_that_a_launcher_made_gets_lines(
    tmp_path: Path, variables: dict[str, str], code: bytes
) -> None:
    """mpirun gives rank 0 one, whose output may go into a file."""
    shown = terminal(tmp_path, 80, variables=variables)
    assert shown.code == 0, shown.last
    assert code not in shown.written
    assert "100 % · step 40" in "".join(shown.last)


@pytest.mark.parametrize(
    "mode", ["raises", *(pytest.param(m, marks=pytest.mark.full) for m in ("forever", "unclosed"))]
)
@pytest.mark.full
def test_whatever_ends_it_leaves_the_terminal_whole(tmp_path: Path, mode: str) -> None:
    interrupted = False

    def interrupt(process: subprocess.Popen[bytes], screen: list[str]) -> None:
        nonlocal interrupted
        if mode == "forever" and not interrupted and "to stderr" in screen:
            interrupted = True
            os.kill(process.pid, signal.SIGINT)

    shown = terminal(tmp_path, 80, mode, react=interrupt)
    (line,) = bars(shown.last)
    text = "".join(shown.last)
    if mode == "raises":
        assert shown.code == 1
        assert shown.last[-1] == "LookupError: what a user raises"
        assert "Traceback" in shown.last[shown.last.index(line) + 1]
    else:
        assert shown.code == (130 if mode == "forever" else 0)
        assert ("SIGINT on rank 0: saved step" in text) == (mode == "forever")
        assert "Traceback" not in text
    assert shown.cursor == (0, True)


def one_line(world: shoal.World, directory: Path) -> str:
    step = step_of(world, torch.nn.Linear(2, 1), lr=0.01)
    data = shoal.Loader((torch.ones(100, 2),), world, batch_size=10)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with shoal.Run(directory, step, data, trackers=()) as run:
            for batch in data.epochs(1):
                step(batch)
                run.tick()
        return out.getvalue()


def test_rank_0_alone_shows_it(two: Ranks, tmp_path: Path) -> None:
    """FAILURES 29: not one bar for each rank."""
    first, other = two.call(one_line, tmp_path)
    assert other == ""
    begin, *_, end = first.splitlines()
    assert begin.startswith("10.0 % · step 1 · epoch 0.10/1 · loss ")
    assert end.startswith("100 % · step 10 · epoch 1.00/1 · loss ")
