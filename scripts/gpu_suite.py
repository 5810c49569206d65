"""Run the tests and the benchmarks of a machine with GPUs: `make test-gpu`, or `gpu_suite.py FOLDER`.

Each command writes its output to a file in the folder, and to the terminal. A command that fails or
takes too long does not stop the next one. The exit code is that of the first failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parents[1]
TIMED_OUT, NOT_FOUND = 124, 127


class Part(NamedTuple):
    """A command, the name of its file, and the minutes after which it is stopped."""

    name: str
    command: Sequence[str]
    minutes: float


def parts(gpus: int, folder: Path) -> list[Part]:
    """Return the commands for a machine with this number of GPUs, in 30 minutes together.

    Checkpoints are written to the disk of `folder`; a temporary directory may be in memory.
    """
    python, many = sys.executable, str(max(2, gpus))
    run = [python, "-m", "shoal", "run", "-n"]
    bench = ROOT / "benchmarks" / "gpu"
    batch = str(256 * gpus)
    resnet = [str(bench / "resnet.py"), "--batch", batch]
    tests = ["-m", "pytest", "-n", "0", "-rs", "-m", "gpu and not long", "tests/gpu"]
    limits = ["--timeout=120", "--session-timeout=600"]  # so that failures so far are printed
    return [
        Part("device", ["nvidia-smi"], 0.5),
        Part("info", [python, "-m", "shoal", "info"], 1),
        Part("tests", [python, *tests, *limits], 11),
        Part("gpt", [python, str(bench / "gpt.py")], 4.5),
        Part("resnet-50", [*run, str(gpus), *resnet, "--depth", "50"], 3),
        Part("resnet-101", [*run, str(gpus), *resnet, "--depth", "101"], 3),
        Part("stall", [python, str(bench / "stall.py"), "--directory", str(folder)], 4),
        Part("memory", [*run, many, str(bench / "memory.py")], 3),
    ]


def run_part(part: Part, folder: Path) -> int:
    """Run one command; return its exit code. Its processes end with it."""
    print(f"== {part.name}, at most {part.minutes:g} minutes", flush=True)
    begun = time.monotonic()
    path = folder / f"{part.name}.txt"
    with path.open("w", encoding="utf-8") as file:
        try:
            code = _run(part, file)
        except OSError as error:
            code = NOT_FOUND
            file.write(f"{error}\n")
    print(path.read_text(encoding="utf-8", errors="replace"))
    print(f"== {part.name}: exit code {code}, {time.monotonic() - begun:.0f} s\n", flush=True)
    return code


def _run(part: Part, file: TextIO) -> int:
    process = subprocess.Popen(
        part.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(60 * part.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        file.seek(0, os.SEEK_END)
        file.write(f"\nstopped after {part.minutes:g} minutes\n")
        return TIMED_OUT


def main(folder: Path) -> int:
    """Run all parts; return the exit code of the first that fails."""
    import torch  # `parts` is tested without it

    gpus = torch.accelerator.device_count()
    if not gpus:
        print(
            "No accelerator: torch.accelerator finds none here. See docs/contributing/gpu-checklist.md"
        )
        return 1
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    codes = [run_part(part, folder) for part in parts(gpus, folder)]
    print(f"Send the files in {folder}: docs/contributing/gpu-checklist.md says where.")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
