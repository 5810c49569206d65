"""`shoal run --logs`: what ranks and their children write, by rank; rank 0's on the screen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import Command, wait_for

pytestmark = pytest.mark.processes

SPEAK = """
import os, subprocess, sys
rank = int(os.environ["RANK"])
print(f"rank {rank} prints")
print(f"rank {rank} complains", file=sys.stderr)
os.write(1, b"not text: \\xff\\n")
subprocess.run(["echo", f"rank {rank}'s child speaks"])
"""
SPOKEN = [
    "rank {} prints",
    "rank {} complains",
    "not text: \N{REPLACEMENT CHARACTER}",
    "rank {}'s child speaks",
]
FAIL = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == int(sys.argv[1]):
    raise ValueError("boom")
"""
HEAD = r"=== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d on \S+, attempt %d of %d: %s ==="


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, start_command: Callable[..., Command]) -> Start:
    """Starts a run of two with these logs."""

    def begin(script: str, logs: str, *options: str) -> Command:
        (tmp_path / "speak.py").write_text(script)
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--logs", logs]
        return start_command([*command, *options])

    return begin


def spoken(rank: int) -> list[str]:
    return [line.format(rank) for line in SPOKEN]


@pytest.mark.full
def test_each_rank_has_its_file_and_rank_0_the_screen(start: Start, tmp_path: Path) -> None:
    for attempt in (1, 2):
        ended = start(SPEAK, "new/logs", "speak.py", "--", "a b").end()
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.splitlines() == spoken(0)
        for rank in range(2):
            log = (tmp_path / f"new/logs/rank-{rank}.log").read_text(errors="replace").splitlines()
            # The second run is appended to the first.
            assert len(log) == attempt * (1 + len(SPOKEN))
            head, *rest = log[-1 - len(SPOKEN) :]
            assert re.fullmatch(HEAD % (1, 1, "speak.py 'a b'"), head)
            assert rest == spoken(rank)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_in_its_log_and_last_on_the_screen_once(
    start: Start, tmp_path: Path, rank: int
) -> None:
    ended = start(SPEAK + FAIL, "logs", "--restarts", "1", "speak.py", str(rank)).end()
    assert ended.code == 0
    assert ended.out.splitlines() == spoken(0) * 2
    assert ended.err.count("ValueError: boom") == 1
    logs = [(tmp_path / f"logs/rank-{each}.log").read_text(errors="replace") for each in range(2)]
    assert [log.count(ended.err) for log in logs] == [int(each == rank) for each in range(2)]
    for log in logs:
        first, second = (re.search(HEAD % (n, 2, rf"speak\.py {rank}"), log) for n in (1, 2))
        assert first is not None
        assert second is not None
        # Where it failed, the report stands between the attempts.
        if "boom" in log:
            assert first.end() < log.index("ValueError: boom") < second.start()


@pytest.mark.full
def test_rank_0_appears_while_the_run_goes_on(start: Start) -> None:
    speaking = start(SPEAK + "import time\nwhile True: time.sleep(1)\n", "logs", "speak.py")
    assert speaking.process.stdout is not None
    # It would wait for ever if a line came only with the end.
    assert [speaking.process.stdout.readline() for _ in SPOKEN] == [f"{line}\n" for line in spoken(0)]
    speaking.process.terminate()
    ended = speaking.end()
    assert (ended.code, ended.out) == (143, "")
    wait_for(lambda: speaking.members() == [])


@pytest.mark.parametrize("folder", ["a file", "a file/below"])
def test_a_directory_that_can_not_be_written_stops_it_before_anything_starts(
    start: Start, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "a file").touch()
    ended = start("raise SystemExit('started')", folder, "speak.py").end()
    assert (ended.code, ended.out) == (2, "")
    given, found, fix = ended.err.splitlines()
    assert given == f"given: --logs {folder}"
    assert found.startswith(f"found: {tmp_path / 'a file'}")
    assert fix.startswith("fix:")
