"""Jobs of `shoal submit` on a cluster on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.cluster.nodes import NodeCluster
from helpers.commands import GONE_WITHIN, wait_for
from helpers.scripts import AGREEING
from shoal.telemetry import events

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Jobs:
    """A directory with train.py, on the login node of a cluster."""

    def __init__(self, cluster: NodeCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {"XDG_CONFIG_HOME": str(folder / "config"), **AS_ROOT}
        (folder / "train.py").write_text(AGREEING)

    def shoal(self, *arguments: str) -> str:
        done = self.try_shoal(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", *arguments]
        return self.cluster.run(command, folder=self.folder, variables=self.variables)

    def submit(self, *arguments: str) -> str:
        """Submit with run directory `run`; the number of the job, of a chain the first."""
        said = self.shoal("submit", "--run", "run", "--time", "10:00", *arguments)
        return str(re.findall(r"^job (\d+)", said)[0])

    def command(self, *command: str) -> str:
        """Run a command of the scheduler."""
        done = self.cluster.run(command, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self, element: str = "") -> str:
        path = self.folder / f"run/jobs/1/log{element}.txt"
        return path.read_text() if path.exists() else ""

    def ends(self) -> list[tuple[str, int]]:
        """The job and the exit code of each end of one."""
        path = self.folder / "run/jobs/1/ends"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], int(line.split()[2])) for line in lines]

    def wait(self, condition: Callable[[], bool], timeout: float = GONE_WITHIN) -> None:
        def told() -> str:
            return f"{self.log()}\n{self.cluster.queue()}"

        wait_for(condition, timeout, every=0.1, told=told)

    def wait_for_step(self, number: int, run: str = "run") -> None:
        """Until a step is recorded, which training waits after."""
        path = self.folder / run / "events/rank-0.jsonl"
        self.wait(lambda: path.exists() and number in (e.get("step") for e in events.read_events(path)))

    def wait_for_files(self, *names: str) -> None:
        self.wait(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_log(self, words: str) -> None:
        """Until the log has them: a script goes on for a moment after it has noted its exit code."""
        self.wait(lambda: words in self.log())

    def wait_for_codes(self, *codes: int, timeout: float = GONE_WITHIN) -> None:
        """Until the job has ended so often, each time with such an exit code."""
        self.wait(lambda: len(self.ends()) == len(codes), timeout)
        assert tuple(code for _, code in self.ends()) == codes, self.log()

    def gone(self) -> bool:
        return self.cluster.queue().strip() == ""
