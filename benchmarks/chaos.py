"""1,000 kills over parallelism strategies: is the end always that of an undisturbed run?

    python benchmarks/chaos.py --kills 1000          # or: make chaos
    python benchmarks/chaos.py --kills 20 --strategies ddp fsdp

Each training has a seed. After a kill, it is launched again, on the same or another number of ranks,
until it ends; a launch also restarts its ranks itself up to some number of times. Every operation of a
save is a place for a kill; those with the fewest kills come first. With --oom, each launch has one
kill, at a random time, by the kernel for lack of memory. Trainings that have ended are lines of
--results, and a further call continues after them. No training starts after --minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from disturbed import SCRIPT, count_samples, damaged
from harness import finish, parse, show, versions
from shoal.checkpoint.inspect.diff import compare
from shoal.checkpoint.inspect.manifest import inspect_checkpoint
from shoal.tools.chaos.containment import contain
from shoal.tools.chaos.faults import Fault
from shoal.tools.chaos.final_state import digest_end, latest_checkpoint
from shoal.tools.chaos.rank import ActionRequest, ControlDirectory, Notice
from shoal.tools.chaos.storm import end_processes, run_attempt

EPOCHS = 5
ROUNDING = 1e-12
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

Boundary = tuple[int, str]
"""A rank, and an operation of a save with steps relative to the save."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy with its numbers of ranks; `fixed` if its result depends on them."""

    name: str
    args: tuple[str, ...]
    sizes: tuple[int, ...] = (2, 3, 4)
    fixed: bool = False
    bits: bool = False
    oom: bool = False


CASES = {
    "ddp": Case(name="DDP", args=()),
    "ddp-bits": Case(name='DDP, exact="bits"', args=("--exact", "bits"), bits=True),
    "fsdp": Case(name="FSDP", args=("--strategy", "fsdp")),
    "tensor": Case(name="TensorParallel + FSDP", args=("--strategy", "tensor"), sizes=(2, 4)),
    "pipeline": Case(name="Pipeline", args=("--strategy", "pipeline"), sizes=(2, 4)),
    "local": Case(name="LocalSGD", args=("--strategy", "local"), fixed=True),
}


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

    def choose(self, found: Iterable[Boundary], draw: random.Random) -> Boundary:
        """Return the one with the fewest kills."""
        return min(found, key=lambda each: (self.kills[each], draw.random()))


def general(operation: str, step: int) -> str:
    return re.sub(r"step-(\d+)", lambda found: f"step-N{int(found[1]) - step:+d}", operation)


def particular(operation: str, step: int) -> str:
    return re.sub(r"step-N([+-]\d+)", lambda found: f"step-{step + int(found[1])}", operation)


class DisturbedTraining:
    """A training in `folder`, which is killed in launches until one of them reaches the end."""

    def __init__(self, folder: Path, case: Case, draw: random.Random) -> None:
        self._folder, self._case, self._draw = folder, case, draw
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.checkpoints = self.home / "runs" / "a" / "checkpoints"
        self.taken = self.corrupt = 0
        self.kills: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.problem = ""

    def run(self, known: dict[int, Boundaries], sizes: Sequence[int]) -> None:
        """Launch until the training has ended. Each launch has one of `sizes`."""
        while not self.problem:
            size = self._draw.choice(sizes)
            restarts = self._draw.choice((0, 0, 1, 2, 4))
            found = latest_checkpoint(self.checkpoints) if self.checkpoints.is_dir() else None
            latest = 0 if found is None else found[1].step
            faults, late = plan_launch(self._draw, known[size], size, restarts, latest)
            if self._case.oom:
                faults, late = [], True
            before = len(self.kills)
            code, output, notices = self.launch(size, restarts, faults, late=late)
            known[size].add(notices)
            self._check(code, output, notices, latest, killed=len(self.kills) > before)
            if not code:
                return

    def launch(
        self, size: int, restarts: int, faults: Sequence[Fault], *, late: bool
    ) -> tuple[int, str, list[Notice]]:
        """Do what `shoal run` does; return its exit code, its output and what ranks noted."""
        self.sizes.append(size)
        number = len(self.sizes)
        folder = self._folder / f"launch-{number}"
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
        victim, delay = self._draw.randrange(size), self._draw.uniform(0, LONGEST_START)
        due: float | None = None
        killed: list[dict[str, Any]] = []

        def perform(request: ActionRequest, launcher: int) -> Sequence[tuple[float, str]]:
            if request.action == "kill-launcher":
                os.kill(launcher, signal.SIGKILL)
            else:
                end_processes()
            return ()

        def look() -> None:
            nonlocal due, late
            if late and due is None:
                begun = [each for each in control.notices() if each.kind == "start"]
                due = time.monotonic() + delay if len(begun) == size else None
            if late and due is not None and time.monotonic() > due:
                kill = exhaust_memory if self._case.oom else kill_process
                killed.extend(kill_rank(control, victim, kill))
                late = False

        done = run_attempt(order, folder, self.home, LIMIT, perform, look)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # whose parents were killed
                pass
        happened = control.injected()
        killed += [
            {**asdict(fault), "at": general(fault.operation, fault.step), "place": fault.place}
            for fault in faults
            if fault.number in happened
        ]
        self.kills += [{**each, "size": size, "launch": number} for each in killed]
        return done.code, done.output, list(control.notices())

    def _check(
        self, code: int, output: str, notices: Sequence[Notice], latest: int, *, killed: bool
    ) -> None:
        """Check a launch that has ended, which began after the checkpoint of step `latest`."""
        attempts: dict[int, list[int]] = {}
        for each in notices:
            if each.rank == 0 and each.kind in ("start", "step"):
                steps = attempts.setdefault(each.pid, [])
                steps += [each.step] if each.kind == "step" else []
        self.taken += sum(map(len, attempts.values()))
        self.corrupt += len(damaged(self.checkpoints))
        first = next((steps[0] for steps in [*attempts.values()][:1] if steps), latest + 1)
        launch = f"launch {len(self.sizes)}"
        if code == 124:
            self.problem = f"{launch} did not end in {LIMIT:g} s"
        elif code and not killed:
            self.problem = f"{launch} failed without a kill, with {code}"
        elif first != latest + 1:
            self.problem = f"{launch} resumed at step {first} after checkpoint {latest}"
        elif "skipped" in output:
            self.problem = f"{launch} skipped a damaged checkpoint"
        elif len(self.sizes) > MOST_LAUNCHES:
            self.problem = f"it did not end in {MOST_LAUNCHES} launches"
        if self.problem:
            self.problem += f":\n{output}"


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
        time.sleep(0.01)
    GROUP.rmdir()


def kill_rank(
    control: ControlDirectory, rank: int, kill: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Kill the newest process of a rank, unless it has ended, and return the kill."""
    last = [each for each in control.notices() if each.rank == rank][-1]
    try:
        kill(last.pid)
    except ProcessLookupError:
        return []
    where = f"save of step {last.step}" if last.kind == "save" else f"after step {last.step}"
    place = f"rank {rank}, {where}"
    return [{"kind": "kill-any-time", "rank": rank, "step": last.step, "place": place}]


class Storm:
    """The trainings of one strategy, and its undisturbed trainings by number of ranks."""

    def __init__(self, folder: Path, key: str, lines: Sequence[dict[str, Any]], *, oom: bool) -> None:
        self._folder, self.key = folder / key, key
        self._kills = [kill for each in lines if each["strategy"] == key for kill in each["kills"]]
        args = (*CASES[key].args, "--epochs", str(EPOCHS))
        self.case = replace(CASES[key], args=args, oom=oom)
        self.known: dict[int, Boundaries] = {}
        self.calm: dict[int, DisturbedTraining] = {}

    def survey(self, size: int) -> None:
        """Train undisturbed on a number of ranks."""
        calm = DisturbedTraining(self._folder / f"calm-{size}", self.case, random.Random(0))
        code, output, notices = calm.launch(size, 0, [], late=False)
        if code:
            raise SystemExit(f"{self.case.name} on {size} ranks failed by itself:\n{output}")
        self.calm[size], self.known[size] = calm, Boundaries()
        self.known[size].add(notices, calm=True)
        self.known[size].kills.update(
            (kill["rank"], kill["at"])
            for kill in self._kills
            if kill.get("at") and kill["size"] == size
        )

    def run(self, number: int, seed: str) -> dict[str, Any]:
        """Run one training under kills and return its line of the results."""
        draw = random.Random(seed)
        fixed = self.case.fixed or (not self.case.bits and draw.random() < 0.5)
        sizes = (draw.choice(self.case.sizes),) if fixed else self.case.sizes
        for size in sizes:
            if size not in self.calm:
                self.survey(size)
        began = time.monotonic()
        training = DisturbedTraining(self._folder / str(number), self.case, draw)
        training.run(self.known, sizes)
        line = {
            "training": number,
            "strategy": self.key,
            "seed": seed,
            "ranks": training.sizes,
            "kills": training.kills,
            "taken": training.taken,
            "corrupt": training.corrupt,
            "problem": training.problem,
            "seconds": round(time.monotonic() - began, 1),
        }
        if not training.problem:
            line |= self._compare(training, sizes)
        if not line["problem"]:
            shutil.rmtree(self._folder / str(number))
        return line

    def _compare(self, training: DisturbedTraining, sizes: Sequence[int]) -> dict[str, Any]:
        calm = self.calm[sizes[0]]
        repeated, missed = count_samples(training.home, EPOCHS)
        identical = digest_end(training.home) == digest_end(calm.home)
        found = latest_checkpoint(training.checkpoints), latest_checkpoint(calm.checkpoints)
        assert found[0] is not None
        assert found[1] is not None
        compared = compare(inspect_checkpoint(found[1][0]), inspect_checkpoint(found[0][0]))
        # The rest are the number of ranks and their random generators.
        plain = [each for each in compared.plain if each[0].startswith("state/")]
        changed = [each for each in compared.changed if each.name.startswith("state/")]
        difference = max((each.relative for each in changed), default=0.0)
        identical = identical or (self.case.bits and not changed and not plain)
        exact = len(sizes) == 1 or self.case.bits
        problem = ""
        if repeated or missed:
            problem = f"{repeated} samples repeated, {missed} missed"
        elif training.corrupt:
            problem = f"{training.corrupt} corrupt checkpoints"
        elif found[0][1].step != found[1][1].step:
            problem = f"it ended at step {found[0][1].step}"
        elif (exact and not identical) or difference > ROUNDING or plain:
            problem = f"the end differs by {difference:.1e}, and in {plain}"
        return {
            "needed": found[1][1].step,
            "samples": repeated + missed,
            "identical": identical,
            "promised": exact,
            "difference": difference,
            "problem": problem,
        }


def row(name: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one or several strategies.

    It has kills, and kills in saves at how many operations of which ranks; steps taken and needed;
    samples repeated or missed, corrupt checkpoints; ends with the same bits, or equal to rounding.
    """
    kills = [(each["strategy"], kill) for each in lines for kill in each["kills"]]
    ended = [each for each in lines if "needed" in each]
    exact = [each["identical"] for each in ended if each["promised"]]
    close = [each["difference"] <= ROUNDING for each in ended if not each["promised"]]
    return {
        "strategy": name,
        "kills": len(kills),
        "in saves": sum(kill["kind"] == "kill-in-save" for _, kill in kills),
        "places": len({(s, k["size"], k["rank"], k["at"]) for s, k in kills if k.get("at")}),
        "taken": sum(each["taken"] for each in ended),
        "needed": sum(each["needed"] for each in ended),
        "samples": sum(each["samples"] for each in ended),
        "corrupt": sum(each["corrupt"] for each in lines),
        "bits": f"{sum(exact)}/{len(exact)}",
        "equal": f"{sum(close)}/{len(close)}",
    }


def run_storms(given: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Run trainings until there are enough kills, or the time is over."""
    shutil.rmtree(given.scratch, ignore_errors=True)
    storms = {key: Storm(given.scratch, key, lines, oom=given.oom) for key in given.strategies}
    until = time.monotonic() + 60 * given.minutes
    while time.monotonic() < until and sum(len(each["kills"]) for each in lines) < given.kills:
        number = len(lines)
        done = Counter(dict.fromkeys(given.strategies, 0))
        for each in lines:
            done[each["strategy"]] += len(each["kills"])
        key = min(given.strategies, key=done.__getitem__)
        line = storms[key].run(number, f"{given.seed} {number}")
        lines.append(line)
        with given.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{time.strftime('%H:%M:%S')} {number} {key}: {len(line['kills'])} kills in "
            f"{line['seconds']} s; {line['problem'] or 'equal'}",
            flush=True,
        )


def main() -> None:
    files = {"results": Path("build/chaos.jsonl"), "scratch": Path("build/chaos")}
    numbers = {"kills": 1000, "minutes": 24 * 60.0, "seed": 0}
    given = parse(__doc__, strategies=CASES, oom=False, **numbers, **files)
    if os.getpid() != 1:
        # All processes end with this one, and no signal leaves the PID namespace.
        command = contain([sys.executable, *sys.argv])
        os.execvpe(command[0], command, os.environ | {"OMP_NUM_THREADS": "1"})
    given.scratch = given.scratch.absolute()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    known = given.results.read_text().splitlines() if given.results.exists() else []
    lines: list[dict[str, Any]] = [json.loads(line) for line in known]
    run_storms(given, lines)
    rows = [row(key, [e for e in lines if e["strategy"] == key]) for key in given.strategies]
    rows.append(row("all", lines))
    show(versions("shoal", "torch"), rows)
    finish(given, {"chaos": rows})


if __name__ == "__main__":
    main()
