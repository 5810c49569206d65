"""One job of a study: the processes of a short training, and its results."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from shoal.distributed.env_vars import THREADS, on_this_node, set_variables
from shoal.tools.bench.scaling.aggregate import FEWEST, Repeat, StepTimes, summarize
from shoal.tools.bench.scaling.configurations import (
    Configuration,
    ScriptSubject,
    StudyOptions,
    fill_arguments,
)
from shoal.tools.bench.scaling.directory import Study, write_json
from shoal.tools.report import PARTS, Attempt, Reader
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.python import script_command, shoal_command
from shoal.util.safe_text import printable
from shoal.util.signal_handler import handle_signals

GRACE = 20.0
"""Seconds between asking a job to end and killing it."""
LOG, RUN, ORDER = "log.txt", "run", "order.json"
WORKER = Path(__file__).with_name("worker") / "__main__.py"
"""The module that trains models that are not scripts."""
TAIL = 200_000
"""Bytes at the end of a log that are searched for the reason of a failure."""
_SHARED = {"none", "shoal run", "torchrun"}
"""Launchers whose ranks see the same devices with the same numbers."""


class Done(NamedTuple):
    """The end of a job: its exit code, None if it exceeded its time limit; and its seconds.

    `cores` is the number of cores of its machine, 0 if unknown, and `others` the number of cores that
    other programs used at the same time.
    """

    code: int | None
    began: float
    seconds: float
    cores: int = 0
    others: float = 0.0


def run_job(study: Study, configuration: Configuration, number: int, mpirun: str) -> Repeat:
    """Run a job and read its results. A failure is a result too.

    Raises LaunchError if there is no mpirun for a configuration that needs it.
    """
    folder = prepare_job(study, configuration, number)
    command = command_of(study, configuration, folder, mpirun)
    threads = str(study.options.threads) if study.options.threads else None
    with on_this_node(), set_variables({THREADS: threads} if threads else {}):
        done = execute(command, folder, study.options.limit)
    return read_job_result(study, configuration, number, done)


def prepare_job(study: Study, configuration: Configuration, number: int) -> Path:
    """Create the directory of a job with its input, without files of a killed earlier one."""
    folder, options = study.job(configuration, number), study.options
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    order = {
        "model": options.model,
        "steps": options.warmup + options.steps,
        "run": str((folder / RUN).absolute()),
        "configuration": asdict(configuration),
    }
    write_json(folder / ORDER, order)
    return folder


def script_of(options: StudyOptions) -> str:
    """Return the script that each process of a job runs."""
    return options.subject.path if isinstance(options.subject, ScriptSubject) else str(WORKER)


def arguments_of(options: StudyOptions, configuration: Configuration, folder: Path) -> list[str]:
    """Return the arguments of that script, for a job whose files are in `folder`."""
    if isinstance(options.subject, ScriptSubject):
        return fill_arguments(options, configuration, str((folder / RUN).absolute()))
    return [str((folder / ORDER).absolute())]


def command_of(study: Study, configuration: Configuration, folder: Path, mpirun: str) -> list[str]:
    """Return the command that starts a local job."""
    program = script_of(study.options)
    args = arguments_of(study.options, configuration, folder)
    count = str(configuration.processes)
    if configuration.backend == "mpi":
        return [*shlex.split(mpirun), "-n", count, *script_command(program, *args)]
    return shoal_command("run", "-n", count, program, *(["--", *args] if args else []))


@contextmanager
def end_job_on_signals() -> Iterator[None]:
    """End the job on a signal that ends this process, since the job has a separate session."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    with handle_signals((signal.SIGTERM, signal.SIGHUP), leave):
        yield


def find_mpirun() -> str:
    """Return the mpirun of this machine, with options that allow more processes than cores.

    Raises LaunchError if there is none.
    """
    path = shutil.which("mpirun")
    if path is None:
        raise LaunchError(
            given="the backend mpi",
            found="there is no mpirun on the PATH",
            fix="load an MPI module, or use --mpirun '/path/to/mpirun --oversubscribe'",
        )
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return f"{path} --oversubscribe --bind-to none" if "Open MPI" in told.stdout else path


def execute(command: Sequence[str], folder: Path, limit: float) -> Done:
    """Run a command to its end or its time limit, with its output in `folder / LOG`.

    The command never runs on afterwards.
    """
    began, clock, busy, own = CLOCK.wall(), CLOCK.now(), _busy(), _own()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    seconds = CLOCK.now() - clock
    others = (_busy() - busy - (_own() - own)) / max(seconds, 1e-9)
    return Done(code, began, seconds, len(os.sched_getaffinity(0)), max(0.0, others))


def _busy() -> float:
    """Return the seconds of all cores spent on anything since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _own() -> float:
    """Return the core seconds of processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job that is still running: terminate, then kill it with all of its group."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_job_result(study: Study, configuration: Configuration, number: int, done: Done) -> Repeat:
    """Return the result of a job that has ended, from its run directory and output."""
    folder = study.job(configuration, number)
    common: dict[str, Any] = {
        "key": configuration.key,
        "round": number,
        "began": done.began,
        "seconds": done.seconds,
        "others": done.others,
        "cores": done.cores,
    }
    if done.code is None:
        limit = study.options.limit
        return Repeat(**common, measured=None, reason=f"not finished after {limit:g} s (--limit)")
    if done.code:
        log = (folder / LOG).read_bytes()[-TAIL:].decode(errors="replace")
        return Repeat(**common, measured=None, reason=reason_of(done.code, log))
    try:
        attempt = _attempt(folder / RUN)
        measured = measure_attempt(attempt, study.options.warmup, study.options.steps)
        return Repeat(**common, measured=measured, **_circumstances(attempt))
    except ShoalError as error:
        return Repeat(**common, measured=None, reason=printable(error.found))


def _attempt(directory: Path) -> Attempt:
    reader = Reader(directory)
    reader.poll()
    if reader.history.latest is None:
        raise LaunchError(
            given=str(directory), found="it has no recorded step", fix="call run.tick() after each step"
        )
    return reader.history.latest


def measure_attempt(attempt: Attempt, warmup: int, steps: int) -> StepTimes:
    """Return the steps after the first `warmup`, at most `steps`.

    Raises LaunchError if there are fewer than two, or if a rank lacks them.
    """
    tracks = [attempt.ticks(rank) for rank in range(attempt.size)]
    count = min((len(track) for track in tracks), default=0) - warmup
    if count < FEWEST:
        raise LaunchError(
            given=f"{warmup} steps to warm up and 2 or more to measure",
            found=f"{count + warmup} steps were recorded by each of {attempt.size} processes",
            fix="increase the number of steps: --steps {steps} among its arguments",
        )
    chosen = [track[warmup : warmup + steps] for track in tracks]
    if not chosen[0]["wall"].sum() > 0:
        raise LaunchError(
            given=f"steps {warmup + 1} to {warmup + len(chosen[0])}",
            found="its steps took no time, so they can't be compared",
            fix="call run.tick() once after each step",
        )
    loss = float(chosen[0]["loss"][-1])
    recorded = [part for part in PARTS if part in (chosen[0].dtype.names or ())]
    return summarize(
        np.stack([track["wall"].astype(np.float64) for track in chosen]),
        {part: np.stack([track[part].astype(np.float64) for track in chosen]) for part in recorded},
        samples=chosen[0]["size"].tolist(),
        hosts=[attempt.host(rank) or "?" for rank in range(attempt.size)],
        loss=loss if np.isfinite(loss) else None,
    )


def _circumstances(attempt: Attempt) -> dict[str, Any]:
    """Return hosts and devices of the ranks, and the model's size."""
    starts = [attempt.starts.get(rank, {}) for rank in range(attempt.size)]
    parameters = starts[0].get("parameters")
    devices = []
    for rank, start in enumerate(starts):
        device = str(start.get("device", "?"))
        # A task that sees one GPU has the same number for it as its neighbours have for theirs.
        own = "" if start.get("launcher") in _SHARED else f" of rank {rank}"
        devices.append(device + own if device.startswith("cuda") else device)
    return {
        "hosts": tuple(attempt.host(rank) or "?" for rank in range(attempt.size)),
        "devices": tuple(devices),
        "parameters": parameters if type(parameters) is int else None,
    }


_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory|DefaultCPUAllocator", re.I)
_RAISED = re.compile(r"^\s*(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt)): *(.*)$", re.M)
_USAGE = re.compile(r"^\S+: error: .+$", re.M)
"""The last line of argparse."""
_FOUND = re.compile(r"^ *found: *(.+)$", re.M)


def reason_of(code: int, log: str) -> str:
    """Return why a job failed, in a line: from its output, else from its exit code."""
    found, raised = _FOUND.findall(log), _RAISED.findall(log)
    line = found[-1] if found else ": ".join(filter(None, raised[-1])) if raised else ""
    if not line and (usage := _USAGE.findall(log)):
        line = usage[-1]
    if _MEMORY.search(log):
        line = f"out of memory: {line}" if line else "out of memory"
    elif not line and code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        line = "killed (SIGKILL), as the system does when memory is low"
    if not line:
        last = [text for text in log.splitlines() if re.search(r"\w", text)]
        line = last[-1].strip() if last else "no output"
    return printable(f"{line[:300]} (exit code {code})")
