"""Run the tests and the benchmarks of a machine with GPUs in a given time, the most valuable first.

python scripts/gpu_suite.py build/gpu --minutes 9
python scripts/gpu_suite.py build/gpu --minutes 2 --dry-run     # tiny sizes, on the CPU

Each part writes its output to a file in the folder, and its figures to the terminal as it ends.
results.json has the figures of all parts so far. A part that takes too long is ended with all its
processes. After a part that fails, the next one starts. The exit code is that of the first failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[1]
TIMED_OUT, NOT_FOUND = 124, 127
ENDING = 2.0
"""Seconds kept back from the last part: to end its processes, and to write the results."""
TINY_GPT = "--layers 2 --width 32 --heads 2 --context 16 --words 96 --batch 2"


class Part(NamedTuple):
    """A command of the suite, which gets a fraction of its time."""

    name: str
    command: Callable[[float], Sequence[str]]
    """The command, for the seconds after which it is ended."""
    fraction: float
    """Weight of the part: its minutes in a suite of nine minutes."""
    least: float
    """Seconds; with fewer, the part is skipped."""


def limit_of_first(parts: Sequence[Part], remaining: float) -> float | None:
    """Return the seconds of the first of these parts if all run in the remaining seconds.

    The time that earlier parts leave goes to all later ones, in proportion to their fractions. None:
    too short for this part.
    """
    limit = remaining * parts[0].fraction / sum(part.fraction for part in parts)
    return limit if limit >= parts[0].least else None


def parts(gpus: int, folder: Path, minutes: float, *, tiny: bool = False) -> list[Part]:
    """Return the parts for a machine with this number of GPUs, the most valuable first.

    Checkpoints are written to the disk of `folder`; a temporary directory may be in memory. If `tiny`,
    each part has a size for a CPU.
    """
    gigabytes = min(8.0, round(0.3 * minutes, 1))  # some six saves in a ninth of the time
    strategies = "tests/gpu/test_gpu_training.py::test_every_strategy_trains_like_one_process"
    others = ["tests/gpu", "--deselect", strategies]
    gpt, resnet, memory = "--compile blocks", f"--batch {256 * gpus}", "--layers 12"
    stall = f"--gigabytes {gigabytes:g}"
    if tiny:
        strategies = (
            "tests/gpu/test_gpu_steps.py::test_results_are_late_where_the_device_can_skip_a_step"
        )
        others = ["tests/gpu/test_gpu_steps.py", "-k", "evaluation or tick"]
        gpt += f" {TINY_GPT} --steps 1"
        resnet, memory = "--width 4 --size 32 --batch 4 --steps 1", TINY_GPT
        stall = "--gigabytes 0.001 --width 64 --batch 8 --steps 2"
    where = "full" if tiny else "gpu and not long"
    least = 0.1 if tiny else 1.0
    return [
        Part("strategies", _tests(where, [strategies]), 2, 25 * least),
        Part("tests", _tests(where, others), 1, 25 * least),
        Part("gpt", _benchmark("gpt.py", 1, gpt), 2, 30 * least),
        Part("resnet-50", _benchmark("resnet.py", gpus, f"{resnet} --depth 50"), 1, 25 * least),
        Part("stall", _benchmark("stall.py", 1, stall, "--directory", str(folder)), 1, 25 * least),
        Part("memory", _benchmark("memory.py", max(2, gpus), memory), 0.75, 30 * least),
        Part("resnet-101", _benchmark("resnet.py", gpus, f"{resnet} --depth 101"), 1, 25 * least),
        Part("info", lambda _: [sys.executable, "-m", "shoal", "info"], 0.25, 10 * least),
    ]


def _tests(where: str, names: Sequence[str]) -> Callable[[float], Sequence[str]]:
    """Return the command of tests that end before their limit, so that failures so far are printed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rfEs", "--tb=short", "-m", where, *names]
    return lambda limit: [
        *command, f"--session-timeout={0.65 * limit:.0f}", f"--timeout={0.3 * limit:.0f}"
    ]  # fmt: skip


def _benchmark(script: str, ranks: int, options: str, *more: str) -> Callable[[float], Sequence[str]]:
    """Return the command of a benchmark that ends before its limit."""
    launcher = ["-m", "shoal", "run", "-n", str(ranks)] if ranks > 1 else []
    path = str(ROOT / "benchmarks" / "gpu" / script)
    command = [sys.executable, *launcher, path, *options.split(), *more, "--json"]
    if script == "memory.py":  # which takes the same number of steps each time
        return lambda limit: command
    return lambda limit: [*command, f"--seconds={0.8 * limit:.0f}"]


def figures_in(text: str) -> dict[str, Any]:
    """Return the figures that a part has printed: the outcomes of tests, or the last object in JSON."""
    lines = text.splitlines()[::-1]
    summary = next((line for line in lines if re.search(r"\d \w+.* in [\d.]+s", line)), "")
    counts = re.findall(r"(\d+) (failed|passed|skipped|deselected|errors?)", summary)
    if counts:
        outcomes: dict[str, Any] = {outcome: int(count) for count, outcome in counts}
        failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return outcomes | ({"failures": failures} if failures else {})
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def flattened(figures: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield a line for each figure, with the names of the objects that contain it."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}, ")
        else:
            yield f"   {before}{name}: {value}"


def run_part(name: str, command: Sequence[str], limit: float, folder: Path) -> dict[str, Any]:
    """Run one command for at most this many seconds; return and print its results."""
    print(f"== {name}: at most {limit:.0f} s", flush=True)
    begun = time.monotonic()
    path = folder / f"{name}.txt"
    with path.open("w", encoding="utf-8") as file:
        try:
            code = _run(command, limit, file)
        except OSError as error:
            code = NOT_FOUND
            file.write(f"{error}\n")
    text = path.read_text(encoding="utf-8", errors="replace")
    found: dict[str, Any] = {
        "exit_code": code,
        "seconds": round(time.monotonic() - begun, 1),
        "figures": figures_in(text),
    }
    print(*flattened(found["figures"]), sep="\n")
    if code:
        print(*text.splitlines()[-20:], sep="\n")
    print(f"== {name}: exit code {code} after {found['seconds']} s, all in {path}\n", flush=True)
    return found


def _run(command: Sequence[str], limit: float, file: TextIO) -> int:
    process = psutil.Popen(
        command,
        cwd=ROOT,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what is printed before it is ended is not lost
    )
    try:
        return int(process.wait(limit))
    except psutil.TimeoutExpired:
        file.seek(0, os.SEEK_END)
        file.write(f"\nended after {limit:.0f} s\n")
        return TIMED_OUT
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    """End a process, its group, and its descendants in groups of their own."""
    descendants = process.children(recursive=True) if process.is_running() else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def run_parts(
    planned: Sequence[Part], seconds: float, folder: Path, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Run parts for at most this many seconds in all; return the content of results.json."""
    until = time.monotonic() + seconds - ENDING
    results: dict[str, Any] = {"machine": machine, "parts": {}}
    for part in planned:  # an earlier run may have left its output
        (folder / f"{part.name}.txt").unlink(missing_ok=True)
    for number, part in enumerate(planned):
        remaining = until - time.monotonic()
        limit = limit_of_first(planned[number:], remaining)
        if limit is None:
            print(f"== {part.name}: skipped, {remaining:.0f} s remain for it and the parts after it\n")
            results["parts"][part.name] = {"skipped": f"{remaining:.0f} s remained"}
        else:
            results["parts"][part.name] = run_part(part.name, part.command(limit), limit, folder)
        _replace(folder / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole: a reader finds the previous text or this one."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def describe_machine() -> dict[str, Any]:
    """Return the accelerators, and the versions that results depend on."""
    import torch  # the schedule is tested without it

    device = torch.accelerator.current_accelerator(check_available=True)
    name = torch.get_device_module(device).get_device_name() if device else platform.machine()
    count = torch.accelerator.device_count() if device else 0
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return {"device": name, "devices": count, "python": platform.python_version(), **versions}


def main() -> int:
    """Run all parts; return the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30, help="for all parts; default: 30")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also without a GPU")
    given = parser.parse_args()
    machine = describe_machine()
    if not machine["devices"] and not given.dry_run:
        print(
            "No accelerator: torch.accelerator finds none here. See docs/contributing/gpu-checklist.md"
        )
        return 1
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    planned = parts(max(1, machine["devices"]), folder, given.minutes, tiny=given.dry_run)
    spent = time.time() - psutil.Process().create_time()
    results = run_parts(planned, 60 * given.minutes - spent, folder, machine)
    print(f"Send the files of {folder}: docs/contributing/gpu-checklist.md says where.")
    codes = [found.get("exit_code", 0) for found in results["parts"].values()]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
