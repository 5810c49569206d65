"""A file server that hangs or dies while ranks train and save on it: is the end an undisturbed one?

    python benchmarks/chaos_files.py [--seeds 3] [--faults hang,outage] [--json]

The working directory of `shoal run` is on sshfs, a FUSE file system, whose server is `sftp-server`. A
fault begins after a step that the seed draws: the server is stopped with SIGSTOP and continued, or
killed and mounted again. A command that fails is started again, as by a scheduler. All of it is inside
new PID and mount namespaces, which end with the command. Needs root, sshfs and sftp-server.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_training import SCRIPT, count_samples, end_processes, print_results
from shoal.tools.chaos.containment import contain
from shoal.tools.chaos.final_state import digest_end

SERVER = "/usr/lib/openssh/sftp-server"
EPOCHS = 20
FIRST, LAST = 10, 80
"""The steps after which faults begin."""
LIMIT = 600.0
MOST_STARTS = 6
INSIDE = "SHOAL_CHAOS_FILES"
HEAD = ("fault", "runs", "first message", "median delay", "starts", "samples", "bit-identical ends")
_PAUSE = 0.01


@dataclass(frozen=True, kw_only=True)
class ServerFault:
    """The server stops for `seconds`, or is `killed` and back after them, in a run with a `timeout`."""

    text: str
    seconds: float
    killed: bool = False
    timeout: float = 300.0


FAULTS = {
    "hang": ServerFault(text="file server hangs for 20 s", seconds=20.0),
    "outage": ServerFault(
        text="file server hangs for 45 s, the script's timeout is 15 s", seconds=45.0, timeout=15.0
    ),
    "dead": ServerFault(
        text="file server killed, and mounted again after 5 s", seconds=5.0, killed=True
    ),
}


class FileServer:
    """A directory that `sftp-server` serves and sshfs mounts at `path`."""

    def __init__(self, folder: Path) -> None:
        self.served, self.path = folder / "served", folder / "mounted"
        self.served.mkdir(parents=True)
        self.path.mkdir()
        self.mount()

    def mount(self) -> None:
        """Start the server, connected to sshfs by two pipes, and wait for the mount."""
        (to_server, requests), (answers, to_client) = os.pipe(), os.pipe()
        self._server = subprocess.Popen([SERVER], stdin=to_server, stdout=to_client)
        options = ["-f", "-o", "passive", f":{self.served}", str(self.path)]
        self._client = subprocess.Popen(["sshfs", *options], stdin=answers, stdout=requests)
        for end in (to_server, requests, answers, to_client):
            os.close(end)
        while not self.path.is_mount():
            if self._client.poll() is not None:
                raise SystemExit("sshfs did not mount")
            time.sleep(_PAUSE)

    def begin(self, fault: ServerFault) -> None:
        """Begin a fault."""
        self._server.send_signal(signal.SIGKILL if fault.killed else signal.SIGSTOP)

    def end(self, fault: ServerFault) -> None:
        """End a fault."""
        if fault.killed:
            self._server.wait()
            self.unmount()
            self.mount()
        else:
            self._server.send_signal(signal.SIGCONT)

    def unmount(self) -> None:
        """Remove the mount, unless it has ended with its server; processes that use it get errors."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)
        self._client.wait()


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """A training on the server: its end, the starts, and the first message after the fault."""

    digest: str
    samples: int
    starts: int
    message: str
    delay: float | None


def start(home: Path, output: Path, timeout: float) -> subprocess.Popen[bytes]:
    """Start the training in a directory."""
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--restarts", "2", str(SCRIPT), "--"]
    command += ["--epochs", str(EPOCHS), "--timeout", str(timeout)]
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def messages(output: Path) -> list[str]:
    """Return the lines of the output without the progress lines."""
    lines = output.read_text(errors="replace").splitlines()
    return [line for line in lines if "· step" not in line]


def run_training(fault: ServerFault | None, seed: int, folder: Path) -> ServerRun:
    """Train under a fault until a command ends well."""
    server = FileServer(folder)
    output, file = folder / "output.txt", server.served / "samples-0.jsonl"
    timeout = 300.0 if fault is None else fault.timeout
    process = start(server.path, output, timeout)
    first = random.Random(seed).randint(FIRST, LAST)
    starts, began, over, before = 1, 0.0, fault is None, 0
    message, delay = "", None
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        now = time.monotonic()
        taken = len(file.read_text().splitlines()) if file.exists() else 0
        if fault is not None and not began and taken >= first:
            before, began = len(messages(output)), now
            server.begin(fault)
        if fault is not None and began and not over and now > began + fault.seconds:
            server.end(fault)
            over = True
        if began and not message:
            new = messages(output)[before:]
            message, delay = (new[0], now - began) if new else ("", None)
        code = process.poll()
        if code == 0:
            break
        if code is not None and over and starts < MOST_STARTS:
            starts += 1
            process = start(server.path, output, timeout)
        time.sleep(_PAUSE)
    ended = process.poll() == 0
    if not ended:
        print(output.read_text(errors="replace")[-6000:], file=sys.stderr)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    found = ServerRun(
        digest=digest_end(server.served) if ended else "",
        samples=sum(count_samples(server.served, EPOCHS)) if ended else 0,
        starts=starts,
        message=message,
        delay=delay,
    )
    server.unmount()
    return found


def row(fault: ServerFault, runs: Sequence[ServerRun], calm: ServerRun) -> tuple[str, ...]:
    """Return the row of a fault."""
    delays = sorted(run.delay for run in runs if run.delay is not None)
    said = [run.message for run in runs if run.message]
    return (
        fault.text,
        str(len(runs)),
        said[0][:90] if said else "none",
        f"{delays[len(delays) // 2]:.1f} s" if delays else "",
        str(sum(run.starts for run in runs)),
        str(sum(run.samples for run in runs)),
        f"{sum(run.digest == calm.digest for run in runs)} of {len(runs)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        os.environ |= {INSIDE: "1", "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.call(contain([sys.executable, *sys.argv])))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        calm = run_training(None, 0, Path(temporary, "calm"))
        if not calm.digest:
            raise SystemExit("the training failed by itself")
        for name in options.faults.split(","):
            fault = FAULTS[name]
            runs = [
                run_training(fault, seed, Path(temporary, f"{name}-{seed}"))
                for seed in range(options.seeds)
            ]
            rows.append(row(fault, runs, calm))
            print(rows[-1], *(f"{run.delay} {run.message}" for run in runs), sep="\n", flush=True)
        end_processes()
    print_results(HEAD, rows, as_json=options.json)


if __name__ == "__main__":
    main()
