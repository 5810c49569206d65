"""A storm: the undisturbed run, then the same script under faults until it ends. Runs in namespaces."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, cast

import psutil

from shoal.checkpoint.store import Manifest
from shoal.tools.chaos.containment import StormDisk
from shoal.tools.chaos.faults import KINDS, Fault, Survey, plan_faults, shrink
from shoal.tools.chaos.final_state import checkpoint_directories, digest_end, latest_checkpoint
from shoal.tools.chaos.rank import START, ActionRequest, ControlDirectory, Notice
from shoal.tools.chaos.report import InjectedFault, StormReport, StormRequest
from shoal.tools.verify.variants import copy_directory
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError
from shoal.util.python import code_command
from shoal.util.tables import plain_console, print_path

STOP_SECONDS = 1.0
_PAUSE = 0.005
_MORE_ATTEMPTS = 3
"""Attempts in addition to one per fault, after which the storm has failed."""
_LINES = 30


@dataclass(frozen=True, kw_only=True)
class StormAttempt:
    """One start of the script: its exit code, its output with times, and when it ended."""

    code: int
    lines: tuple[tuple[float, str], ...]
    ended: float

    @property
    def output(self) -> str:
        """The last lines of the output."""
        return "".join(line for _, line in self.lines[-_LINES:])


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """All attempts of a run, what their ranks noted, and the SHA-256 of the final checkpoints."""

    attempts: tuple[StormAttempt, ...]
    notices: tuple[Notice, ...]
    began: float
    end: str

    @property
    def seconds(self) -> float:
        """The duration of all attempts."""
        return self.attempts[-1].ended - self.began

    @property
    def code(self) -> int:
        """The exit code of the last attempt."""
        return self.attempts[-1].code

    @property
    def taken(self) -> int:
        """The number of steps that rank 0 took, in all attempts."""
        return sum(each.kind == "step" and each.rank == 0 for each in self.notices)

    @property
    def output(self) -> str:
        """The last lines of the output."""
        return self.attempts[-1].output


class Storm:
    """Runs a script in copies of the working directory, below `scratch`, which is a private tmpfs."""

    def __init__(self, request: StormRequest, origin: Path, scratch: Path) -> None:
        self._request = request
        self._origin = origin
        self._scratch = scratch
        self._runs = 0

    def run(self, faults: Sequence[Fault], lasting: int = 1) -> RunResult:
        """Start the script until it ends well, or once more than the faults explain."""
        self._runs += 1
        folder = self._scratch / f"run-{self._runs}"
        control = ControlDirectory(folder / "control")
        control.path.mkdir(parents=True)
        disk = StormDisk(folder / "home")
        disk.mount()
        try:
            copy_directory(self._origin, disk.path / "work")
            began = CLOCK.now()
            attempts = [self._attempt(folder, control, disk, faults, lasting)]
            while attempts[-1].code and len(attempts) < len(faults) + _MORE_ATTEMPTS:
                disk.restore()
                before = len(control.injected())
                attempts.append(self._attempt(folder, control, disk, faults, lasting))
                if attempts[-1].code and len(control.injected()) == before:
                    break  # it failed without a fault, and would fail again
            disk.restore()
            return RunResult(
                attempts=tuple(attempts),
                notices=tuple(control.notices()),
                began=began,
                end=digest_end(disk.path),
            )
        finally:
            disk.unmount()

    def _attempt(
        self,
        folder: Path,
        control: ControlDirectory,
        disk: StormDisk,
        faults: Sequence[Fault],
        lasting: int,
    ) -> StormAttempt:
        order = {
            "path": self._request.script,
            "args": self._request.args,
            "control": str(control.path),
            "faults": [asdict(fault) for fault in faults],
            "lasting": lasting,
            "processes": self._request.processes,
            "restarts": 0,
        }
        home, seed = disk.path / "work", self._request.seed

        def perform(request: ActionRequest, launcher: int) -> Sequence[tuple[float, str]]:
            if request.action == "second-launcher":
                return _run_again(order_command({**order, "faults": []}, folder, "again"), home)
            _perform(request, launcher, disk, seed)
            return ()

        return run_attempt(order, folder, home, self._request.limit, perform)


def order_command(order: Mapping[str, Any], folder: Path, name: str = "order") -> list[str]:
    """Return the command of one start of a script, which an order describes (`rank.main`)."""
    (folder / f"{name}.json").write_text(json.dumps(order))
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return ["env", f"TMPDIR={temporary}", *code_command(START, str(folder / f"{name}.json"))]


def run_attempt(
    order: Mapping[str, Any],
    folder: Path,
    home: Path,
    limit: float,
    perform: Callable[[ActionRequest, int], Sequence[tuple[float, str]]],
    look: Callable[[], object] = lambda: None,
) -> StormAttempt:
    """Start a script in `home`, and perform the actions that its ranks ask for, until it ends.

    `perform` gets a request and the process of the launcher, and returns lines for the output; `look`
    is called repeatedly. Ends all descendants of this process.
    """
    control = ControlDirectory(Path(order["control"]))
    for request in control.requests():
        control.finish_request(request)
    process = subprocess.Popen(
        order_command(order, folder),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[tuple[float, str]] = []
    stream = cast(TextIO, process.stdout)
    reader = threading.Thread(target=_read_lines, args=(stream, lines), daemon=True)
    reader.start()
    until = CLOCK.now() + limit
    while process.poll() is None and CLOCK.now() < until:
        for request in control.requests():
            lines += perform(request, process.pid)
            control.finish_request(request)
        look()
        CLOCK.sleep(_PAUSE)
    ended = CLOCK.now()
    late = process.poll() is None
    end_processes()
    process.wait()
    reader.join()
    return StormAttempt(code=124 if late else process.returncode, lines=tuple(lines), ended=ended)


def _read_lines(stream: TextIO, lines: list[tuple[float, str]]) -> None:
    with stream:
        for line in stream:
            lines.append((CLOCK.now(), line))


def _run_again(command: Sequence[str], home: Path) -> list[tuple[float, str]]:
    """Run a command to its end and return its lines, with the time of the end."""
    done = subprocess.run(
        command,
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return [(CLOCK.now(), line) for line in done.stdout.splitlines(keepends=True)]


def _perform(request: ActionRequest, launcher: int, disk: StormDisk, seed: int) -> None:
    """Inject a fault that a rank can't inject by itself, or end one."""
    match request.action:
        case "kill-launcher":
            os.kill(launcher, signal.SIGKILL)
        case "kill-all":
            end_processes()
        case "bit-flip":
            flip_bit(disk.path, random.Random(f"{seed} {request.number}"))
            end_processes()
        case "remove-checkpoint":
            end_processes()
            for path, _ in replaceable_checkpoints(disk.path):
                shutil.rmtree(path)
        case "stop":
            os.kill(request.pid, signal.SIGSTOP)
            threading.Timer(STOP_SECONDS, _continue, (request.pid,)).start()
        case "disk-full":
            disk.fill()
        case "inodes-full":
            disk.fill_inodes()
        case _:
            disk.restore()


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def end_processes() -> None:
    """Kill all descendants of this process; in its PID namespace, those are all processes."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def replaceable_checkpoints(home: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the latest checkpoint of each directory in which an older one exists."""
    for directory in checkpoint_directories(home):
        latest = latest_checkpoint(directory)
        if latest is not None and len(list(directory.glob("step-*"))) > 1:
            yield latest


def flip_bit(home: Path, draw: random.Random) -> None:
    """Invert one bit of the latest checkpoint, if an older complete one exists."""
    for path, manifest in replaceable_checkpoints(home):
        name = max(manifest.files, key=lambda each: manifest.files[each].bytes)
        with (path / name).open("r+b") as file:
            place = draw.randrange(manifest.files[name].bytes)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def survey_run(result: RunResult, processes: int) -> Survey:
    """Return the places for faults in the undisturbed run."""
    operations: dict[tuple[int, int], tuple[str, ...]] = {}
    for each in result.notices:
        if each.kind == "save":
            key = (each.rank, each.step)
            operations[key] = (*operations.get(key, ()), each.value)
    steps = [each for each in result.notices if each.kind == "step"]
    return Survey(
        size=processes,
        steps=max((each.step for each in steps), default=0),
        operations=operations,
        children=frozenset(each.rank for each in steps if each.value != "0"),
    )


def run_storm(request: StormRequest, origin: Path, scratch: Path) -> StormReport:
    """Run the script undisturbed, then under faults, and compare.

    Raises LaunchError if the script fails by itself, or takes no step in a Run.
    """
    storm = Storm(request, origin, scratch)
    _say(f"undisturbed: {request.command}")
    calm = storm.run([])
    survey = survey_run(calm, request.processes)
    _check_calm(request, calm, survey)
    faults = plan_faults(request.seed, request.count, request.kinds, survey)
    saves = sorted({step for _, step in survey.operations})
    gaps = [later - earlier for earlier, later in pairwise(saves)]
    lasting = max(gaps, default=1) + 1
    _say(f"storm: {len(faults)} faults, seed {request.seed}")
    result = storm.run(faults, lasting)
    if request.shrinks and problem_of(result, calm):

        def fails(fewer: Sequence[Fault]) -> bool:
            _say(f"shrinking: {len(fewer)} faults")
            return bool(problem_of(storm.run(fewer, lasting), calm))

        faults = tuple(shrink(faults, fails))
        result = storm.run(faults, lasting)
    return make_report(request, faults, result, calm, survey.steps)


def problem_of(result: RunResult, calm: RunResult) -> str:
    """Return the difference from the undisturbed run; empty if there is none."""
    if result.code:
        return f"it did not end: exit code {result.code} after {len(result.attempts)} attempts"
    if result.end != calm.end:
        return "the final checkpoints differ from those of the undisturbed run"
    return ""


def make_report(
    request: StormRequest, faults: Sequence[Fault], result: RunResult, calm: RunResult, steps: int
) -> StormReport:
    """Return the report of a storm."""
    problem = problem_of(result, calm)
    return StormReport(
        command=request.command,
        seed=request.seed,
        processes=request.processes,
        faults=tuple(describe_fault(fault, result) for fault in faults),
        attempts=len(result.attempts),
        steps=steps,
        taken=result.taken,
        seconds=result.seconds,
        undisturbed_seconds=calm.seconds,
        end=result.end,
        undisturbed=calm.end,
        problem=problem,
        output=result.output if problem else "",
        versions={name: version(name) for name in ("shoal", "torch")},
    )


def describe_fault(fault: Fault, result: RunResult) -> InjectedFault:
    """Return a fault with the first message after it, or the end of the attempt if there is none."""
    at = next(
        (e.when for e in result.notices if (e.kind, e.value) == ("injected", str(fault.number))), None
    )
    if at is None:
        return InjectedFault(number=fault.number, kind=fault.kind, place=fault.place, seconds=None)
    attempt = next(each for each in result.attempts if each.ended >= at)
    later = result.attempts[result.attempts.index(attempt) + 1 :]
    kind = KINDS[fault.kind]
    sign = kind.sign
    next_start = kind.damages and bool(sign)
    following = attempt.lines if not next_start else later[0].lines if later else ()
    signs = ((when, line) for when, line in following if when >= at and re.search(sign, line))
    found = next(signs, None) if sign else None
    by, when, message = "", at, ""
    if found is not None:
        by, (when, message) = "Shoal", found
    elif kind.ends and not next_start:
        by, when, message = "scheduler", attempt.ended, f"exit code {attempt.code}"
    return InjectedFault(
        number=fault.number,
        kind=fault.kind,
        place=fault.place,
        seconds=at - result.began,
        noticed_by=by,
        noticed_after=when - at if by else None,
        message=message.strip(),
    )


def _check_calm(request: StormRequest, calm: RunResult, survey: Survey) -> None:
    given = f"shoal chaos {request.command}, without faults"
    fix = f"run it by itself first: shoal run -n {request.processes} {request.command}"
    if calm.code:
        found = f"exit code {calm.code}:\n{calm.output}"
        raise LaunchError(given=given, found=found, fix=fix)
    if not survey.steps:
        found = "it took no step with run.tick() of a shoal.Run"
        raise LaunchError(given=given, found=found, fix="train in a shoal.Run, and call run.tick()")
    if not calm.end:
        found = "it left no checkpoint below its working directory"
        fix = "give it a relative run directory, and end with run.save()"
        raise LaunchError(given=given, found=found, fix=fix)


def _say(text: str) -> None:
    print_path(plain_console(stderr=True), text)
