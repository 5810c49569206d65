"""One training that is killed again and again until it ends, with all that is checked about it.

Each launch is `shoal run` on a number of ranks, which also restarts them itself up to some number of
times. Its faults are drawn when it starts, after the latest complete checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from chaos_warm import fork_launcher
from shoal.checkpoint import Files
from shoal.checkpoint.commit import store_in
from shoal.checkpoint.store import DamageError, damage, manifest_of
from shoal.tools.chaos.control import ControlDirectory, Notice
from shoal.tools.chaos.faults import Fault
from shoal.tools.chaos.final_state import latest_checkpoint
from shoal.tools.report.coverage import coverage
from shoal.util.tables import plain_console, print_rows

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "chaos" / "scripts" / "train.py"
SAMPLES = 110
IN_STEPS = ("kill", "kill-in-forward", "kill-in-backward", "kill-in-update")
OF_LAUNCH = ("kill-all", "kill-launcher", "kill-any-time")
"""They end the launcher, or come from outside; the last is a SIGKILL at a random time."""
IN_SAVE = 0.7
AT_LEFTOVERS = 0.4
"""After a kill in a save: the probability of a second kill, when the next attempt removes the rest."""
LONGEST_START = 1.5
LIMIT = 300.0
MOST_LAUNCHES = 80
GROUP = Path("/sys/fs/cgroup/memory/shoal-chaos")
_PAUSE = 0.01

Boundary = tuple[int, str]
"""A rank, and an operation of a save with steps relative to the save."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy with its numbers of ranks; `fixed` if its result depends on them.

    With `oom`, each launch has one kill, at a random time, by the kernel for lack of memory.
    """

    name: str
    args: tuple[str, ...]
    sizes: tuple[int, ...]
    fixed: bool = False
    bits: bool = False
    oom: bool = False


@dataclass(kw_only=True)
class Boundaries:
    """The operations of saves at one number of ranks: of undisturbed saves by step, all, and kills."""

    calm: dict[int, list[Boundary]] = field(default_factory=dict)
    leftovers: set[Boundary] = field(default_factory=set)
    kills: Counter[Boundary] = field(default_factory=Counter)

    def add(self, notices: Iterable[Notice], *, calm: bool = False) -> None:
        """Add the operations of a run."""
        known = {boundary for found in self.calm.values() for boundary in found}
        for each in notices:
            if each.kind == "save":
                boundary = each.rank, general(each.value, each.step)
                if calm:
                    self.calm.setdefault(each.step, []).append(boundary)
                elif boundary not in known:
                    self.leftovers.add(boundary)

    @property
    def seen(self) -> set[Boundary]:
        return self.leftovers | {boundary for found in self.calm.values() for boundary in found}

    def choose(self, found: Iterable[Boundary], draw: random.Random) -> Boundary:
        """Return the one with the fewest kills."""
        return min(found, key=lambda each: (self.kills[each], draw.random()))


def general(operation: str, step: int) -> str:
    return re.sub(r"step-(\d+)", lambda found: f"step-N{int(found[1]) - step:+d}", operation)


def particular(operation: str, step: int) -> str:
    return re.sub(r"step-N([+-]\d+)", lambda found: f"step-{step + int(found[1])}", operation)


@dataclass(kw_only=True)
class Launched:
    """One `shoal run`: its code, kills, notices, and the process of rank 0 in each of its attempts."""

    code: int
    kills: list[dict[str, Any]]
    notices: list[Notice]
    output: str

    def steps(self) -> list[list[int]]:
        """Return the steps that rank 0 took, by attempt."""
        found: dict[int, list[int]] = {}
        for each in self.notices:
            if each.rank == 0 and each.kind in ("start", "step"):
                found.setdefault(each.pid, [])
                if each.kind == "step":
                    found[each.pid].append(each.step)
        return list(found.values())


class DisturbedTraining:
    """A training in `folder`, which is killed in launches until one of them reaches the end."""

    def __init__(self, folder: Path, case: Case, draw: random.Random) -> None:
        self._folder, self._case, self._draw = folder, case, draw
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._launches = 0
        self.taken = self.corrupt = 0
        self.kills: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.problem = ""

    @property
    def checkpoints(self) -> Path:
        return self.home / "runs" / "a" / "checkpoints"

    def latest(self) -> int:
        """Return the step of the latest complete checkpoint; 0 without one."""
        found = latest_checkpoint(self.checkpoints) if self.checkpoints.is_dir() else None
        return 0 if found is None else found[1].step

    def run(self, known: dict[int, Boundaries], sizes: Sequence[int]) -> None:
        """Launch until the training has ended. Each launch has one of `sizes`."""
        while not self.problem:
            size = self._draw.choice(sizes)
            restarts = self._draw.choice((0, 0, 1, 2, 4))
            latest = self.latest()
            faults, late = plan_launch(self._draw, known[size], size, restarts, latest)
            if self._case.oom:
                faults, late = [], True
            done = self.launch(size, restarts, faults, late)
            known[size].add(done.notices)
            self.kills += done.kills
            self._check(done, latest)
            if not done.code:
                return

    def launch(self, size: int, restarts: int, faults: Sequence[Fault], late: bool) -> Launched:
        """Start `shoal run` and wait for its end."""
        self._launches += 1
        self.sizes.append(size)
        folder = self._folder / f"launch-{self._launches}"
        control = ControlDirectory(folder / "control")
        control.path.mkdir(parents=True)
        order = {
            "path": str(SCRIPT),
            "args": self._case.args,
            "control": str(control.path),
            "faults": [asdict(fault) for fault in faults],
            "lasting": 1,
            "processes": size,
            "restarts": restarts,
        }
        launcher = fork_launcher(order, folder, self.home, folder / "output.txt")
        until = time.monotonic() + LIMIT
        due: float | None = None
        victim = self._draw.randrange(size)
        delay = self._draw.uniform(0, LONGEST_START)
        code: int | None = None
        killed: dict[str, Any] | None = None
        while code is None and time.monotonic() < until:
            for request in control.requests():
                if request.action == "kill-launcher":
                    os.kill(launcher, signal.SIGKILL)
                else:
                    end_processes()
                control.finish_request(request)
            if late and due is None:
                begun = [each for each in control.notices() if each.kind == "start"]
                due = time.monotonic() + delay if len(begun) == size else None
            if due is not None and time.monotonic() > due:
                kill = exhaust_memory if self._case.oom else kill_process
                killed, due, late = kill_rank(control, victim, kill), None, False
            code = reap(launcher)
            time.sleep(_PAUSE)
        end_processes()
        output = (folder / "output.txt").read_text(errors="replace")
        notices = list(control.notices())
        happened = {int(each.value) for each in notices if each.kind == "injected"}
        kills = [
            {
                **asdict(fault),
                "at": general(fault.operation, fault.step),
                "place": fault.place,
                "size": size,
                "launch": self._launches,
            }
            for fault in faults
            if fault.number in happened
        ]
        if killed is not None:
            kills.append({**killed, "size": size, "launch": self._launches})
        return Launched(code=124 if code is None else code, kills=kills, notices=notices, output=output)

    def _check(self, done: Launched, latest: int) -> None:
        """Check a launch that has ended, which began after the checkpoint of step `latest`."""
        attempts = done.steps()
        self.taken += sum(map(len, attempts))
        self.corrupt += len(damaged(self.checkpoints))
        first = next((steps[0] for steps in attempts[:1] if steps), latest + 1)
        if done.code == 124:
            self.problem = f"launch {self._launches} did not end in {LIMIT:g} s"
        elif done.code and not done.kills:
            self.problem = f"launch {self._launches} failed without a kill, with {done.code}"
        elif first != latest + 1:
            self.problem = f"launch {self._launches} resumed at step {first} after checkpoint {latest}"
        elif "skipped" in done.output:
            self.problem = f"launch {self._launches} skipped a damaged checkpoint"
        elif self._launches > MOST_LAUNCHES:
            self.problem = f"it did not end in {MOST_LAUNCHES} launches"
        if self.problem:
            self.problem += f":\n{done.output[-3000:]}"


def plan_launch(
    draw: random.Random, known: Boundaries, size: int, restarts: int, latest: int
) -> tuple[list[Fault], bool]:
    """Draw the faults of a launch, and whether one more comes at a random time.

    One kill for each attempt, at ascending steps; the last one ends the launcher.
    """
    saves = sorted(step for step in known.calm if step > latest)
    faults: list[Fault] = []
    last, late = latest, False
    while saves and len(faults) <= restarts:
        step = saves.pop(0)
        number = len(faults)
        if draw.random() < IN_SAVE:
            at = known.choose(known.calm[step], draw)
            known.kills[at] += 1
            faults.append(_in_save(number, at, step))
            left = [each for each in known.leftovers if each[0] < size]
            if left and number < restarts and draw.random() < AT_LEFTOVERS:
                faults.append(_in_save(number + 1, known.choose(left, draw), step))
        else:
            kind = draw.choice(IN_STEPS + OF_LAUNCH * (number == restarts))
            if kind == "kill-any-time":
                late = True
                break
            where = draw.randint(last + 1, step)
            faults.append(Fault(number=number, kind=kind, rank=draw.randrange(size), step=where))
        last = step
    return faults, late


def _in_save(number: int, at: Boundary, step: int) -> Fault:
    operation = particular(at[1], step)
    return Fault(number=number, kind="kill-in-save", rank=at[0], step=step, operation=operation)


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def exhaust_memory(pid: int) -> None:
    """Let the kernel kill a process: in a control group with 64 KiB, which it exceeds at once."""
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(1 << 16))
    (GROUP / "cgroup.procs").write_text(str(pid))
    while pid in map(int, (GROUP / "cgroup.procs").read_text().split()):
        time.sleep(_PAUSE)
    GROUP.rmdir()


def kill_rank(
    control: ControlDirectory, rank: int, kill: Callable[[int], None]
) -> dict[str, Any] | None:
    """Kill the newest process of a rank. Return None if it has ended."""
    last = [each for each in control.notices() if each.rank == rank][-1]
    try:
        kill(last.pid)
    except ProcessLookupError:
        return None
    where = f"save of step {last.step}" if last.kind == "save" else f"after step {last.step}"
    return {"kind": "kill-any-time", "rank": rank, "step": last.step, "place": f"rank {rank}, {where}"}


def reap(launcher: int) -> int | None:
    """Collect all processes that have ended, and return the exit code of the launcher if it has."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == launcher:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def end_processes() -> None:
    """Kill all descendants of this process, except for the tracker of multiprocessing's resources."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    while found := [
        each
        for each in psutil.Process().children(recursive=True)
        if each.pid != tracker and each.status() != psutil.STATUS_ZOMBIE
    ]:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_PAUSE)


def damaged(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints of a directory whose files differ from their manifests."""
    found = []
    for path in store_in(checkpoints, Files()).candidates() if checkpoints.is_dir() else ():
        assert isinstance(path, Path)
        try:
            reason = damage(path, manifest_of(path))
        except DamageError as error:
            # An unfinished save has a part of a manifest, or none.
            reason = None if path.suffix == ".partial" else str(error)
        if reason is not None:
            found.append(path)
    return found


def count_samples(home: Path, epochs: int) -> tuple[int, int]:
    """Return how many samples the last attempt at each step repeated or missed within an epoch.

    Counted twice: by the indices that the datasets gave, and by `shoal.coverage`.
    """
    steps: dict[int, tuple[int, dict[str, list[int]]]] = {}
    for file in sorted(home.glob("samples-*.jsonl")):
        for line in file.read_text().splitlines():
            attempt, step, ranges, indices, _ = json.loads(line)
            if attempt > steps.get(step, (0, {}))[0]:
                steps[step] = attempt, {}
            if attempt == steps[step][0]:
                # Tensor-parallel ranks and stages of a pipeline have the same samples.
                steps[step][1][str(ranges)] = indices
    in_epoch = max(steps) // epochs
    repeated = missed = 0
    for epoch in range(epochs):
        counts = Counter[int]()
        for step in range(epoch * in_epoch + 1, (epoch + 1) * in_epoch + 1):
            counts.update(index for indices in steps[step][1].values() for index in indices)
        repeated += sum(count - 1 for count in counts.values())
        missed += SAMPLES - len(counts)
    found = coverage(home / "runs" / "a")
    missed += (found.end != SAMPLES * epochs) + len(found.missed)
    return repeated + len(found.repeated), missed


def print_results(head: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """Print a table under the versions, and one JSON object if asked for."""
    versions = f"shoal {version('shoal')}, torch {version('torch')}, Linux {platform.release()}"
    print_rows(plain_console(), versions, head, rows)
    if as_json:
        print(json.dumps({"rows": rows, "versions": versions}))
