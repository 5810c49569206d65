"""The traceback of a ShoalError shows the frames of the user's own code, under plain Python too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.util.user_frames import own_traceback

SCRIPT = """
import shoal


def load(world):
    return shoal.Loader([1.0, 2.0], world, batch_size=0)


def main():
    with shoal.init() as world:
        load(world)


{before}
main()
"""
HOOK = """
import sys


def hook(kind, error, trace, before=sys.excepthook):
    print("seen", kind.__name__)
    before(kind, error, trace)


sys.excepthook = hook
"""
FRAMES = ["in <module>", "in main", "in load"]


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, *options, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def frames(text: str) -> list[str]:
    return [line.partition(", ")[2] for line in text.splitlines() if line.startswith("  File ")]


@pytest.mark.full(rows="all")
@pytest.mark.processes
@pytest.mark.parametrize("hook", ["", "first", pytest.param("second", marks=pytest.mark.long)])
def test_plain_python_shows_the_frames_of_the_script(tmp_path: Path, hook: str) -> None:
    """And calls hooks of others: one that was set before the import of Shoal, and one set after."""
    script = SCRIPT.format(before=HOOK if hook == "second" else "")
    done = run(tmp_path, HOOK + script if hook == "first" else script)
    assert done.returncode == 1
    assert done.stdout == ("seen DataError\n" if hook else "")
    assert [frame.partition(", ")[2] for frame in frames(done.stderr)] == FRAMES
    lines = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "site-packages" not in done.stderr
    assert str(Path(shoal.__file__).parent) not in done.stderr
    assert lines[-5] == "shoal.util.errors.DataError: "
    assert [line.split(":")[0] for line in lines[-4:]] == ["given", "found", "fix", "where"]


@pytest.mark.full
@pytest.mark.processes
def test_development_mode_shows_all_frames(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT.format(before=""), "-X", "dev", "-W", "ignore")
    assert len(frames(done.stderr)) > len(FRAMES)
    assert str(Path(shoal.__file__).parent) in done.stderr


@pytest.mark.processes
def test_other_errors_keep_all_their_frames(tmp_path: Path) -> None:
    done = run(tmp_path, "import json, shoal\njson.loads('{')\n")
    assert len(frames(done.stderr)) > 1
    assert "json" in frames(done.stderr)[-1] or "raw_decode" in done.stderr


def test_a_traceback_without_own_frames_is_none() -> None:
    with pytest.raises(shoal.ShoalError) as raised:
        shoal.LRSchedule()(None, "100")  # type: ignore[arg-type]
    own = own_traceback(raised.value.__traceback__)
    assert own is not None
    assert own.tb_frame.f_code.co_filename == __file__
    assert own.tb_next is None
    assert own_traceback(None) is None
