"""1,000 kills over parallelism strategies: is the end always that of an undisturbed run?

    python benchmarks/chaos.py --kills 1000          # or: make chaos
    python benchmarks/chaos.py --kills 20 --strategies ddp fsdp

`shoal chaos` starts a script until it ends, on one number of ranks. Here, each training has a seed and
is launched with the parts of `shoal chaos`, on the same or another number of ranks; a launch also
restarts its ranks itself up to some number of times. Every operation of a save is a place for a kill;
those with the fewest kills come first. Trainings that have ended are lines of --results, and a further
call continues after them. No training starts after --minutes.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

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

Place = tuple[int, str]
"""A rank, and an operation of a save with steps relative to the save."""


class Case(NamedTuple):
    """A strategy with its numbers of ranks; `fixed` if its result depends on them."""

    name: str
    args: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (2, 3, 4)
    fixed: bool = False
    bits: bool = False


CASES = {
    "ddp": Case("DDP"),
    "ddp-bits": Case('DDP, exact="bits"', ("--exact", "bits"), bits=True),
    "fsdp": Case("FSDP", ("--strategy", "fsdp")),
    "tensor": Case("TensorParallel + FSDP", ("--strategy", "tensor"), sizes=(2, 4)),
    "pipeline": Case("Pipeline", ("--strategy", "pipeline"), sizes=(2, 4)),
    "local": Case("LocalSGD", ("--strategy", "local"), fixed=True),
}


class Operations:
    """The operations of saves at one number of ranks: of undisturbed saves by step, others, kills."""

    def __init__(self) -> None:
        self.calm: dict[int, list[Place]] = {}
        self.leftovers: set[Place] = set()
        self.kills: Counter[Place] = Counter()

    def add(self, notices: Iterable[Notice], *, calm: bool = False) -> None:
        """Add the operations of a run."""
        for each in notices:
            place = each.rank, general(each.value, each.step)
            if each.kind == "save" and calm:
                self.calm.setdefault(each.step, []).append(place)
            elif each.kind == "save" and not any(place in known for known in self.calm.values()):
                self.leftovers.add(place)

    def fault(self, draw: random.Random, number: int, step: int, found: Iterable[Place]) -> Fault:
        """Return a kill at the place with the fewest kills."""
        rank, at = min(found, key=lambda each: (self.kills[each], draw.random()))
        self.kills[rank, at] += 1
        operation = re.sub(r"step-N([+-]\d+)", lambda found: f"step-{step + int(found[1])}", at)
        return Fault(number=number, kind="kill-in-save", rank=rank, step=step, operation=operation)

    def plan(
        self, draw: random.Random, size: int, restarts: int, latest: int
    ) -> tuple[list[Fault], bool]:
        """Draw the faults of a launch, and whether one more comes at a random time.

        One kill for each attempt, at ascending steps; the last one ends the launcher.
        """
        faults: list[Fault] = []
        for step in sorted(step for step in self.calm if step > latest):
            number = len(faults)
            if number > restarts:
                break
            if draw.random() < IN_SAVE:
                faults.append(self.fault(draw, number, step, self.calm[step]))
                left = [each for each in self.leftovers if each[0] < size]
                if left and number < restarts and draw.random() < AT_LEFTOVERS:
                    faults.append(self.fault(draw, number + 1, step, left))
            else:
                kind = draw.choice(IN_STEPS + OF_LAUNCH * (number == restarts))
                if kind == "kill-any-time":
                    return faults, True
                where = draw.randint(latest + 1, step)
                faults.append(Fault(number=number, kind=kind, rank=draw.randrange(size), step=where))
            latest = step
        return faults, False


def general(operation: str, step: int) -> str:
    return re.sub(r"step-(\d+)", lambda found: f"step-N{int(found[1]) - step:+d}", operation)


class DisturbedTraining:
    """A training in `folder`, which is killed in launches until one of them reaches the end."""

    def __init__(self, folder: Path, args: Sequence[str], draw: random.Random) -> None:
        self._folder, self._args, self._draw = folder, args, draw
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.checkpoints = self.home / "runs" / "a" / "checkpoints"
        self.taken = self.corrupt = 0
        self.kills: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.problem = ""

    def run(self, known: dict[int, Operations], sizes: Sequence[int]) -> None:
        """Launch until the training has ended. Each launch has one of `sizes`."""
        code = 1
        while code and not self.problem:
            size = self._draw.choice(sizes)
            restarts = self._draw.choice((0, 0, 1, 2, 4))
            found = latest_checkpoint(self.checkpoints) if self.checkpoints.is_dir() else None
            latest = 0 if found is None else found[1].step
            plan = known[size].plan(self._draw, size, restarts, latest)
            before = len(self.kills)
            code, output, notices = self.launch(size, restarts, *plan)
            known[size].add(notices)
            self.problem = self._check(code, output, notices, latest, before)
            if self.problem:
                self.problem = f"launch {len(self.sizes)} {self.problem}:\n{output}"

    def launch(
        self, size: int, restarts: int, faults: Sequence[Fault], late: bool
    ) -> tuple[int, str, list[Notice]]:
        """Do what `shoal run` does; return its exit code, its output and what ranks noted."""
        self.sizes.append(size)
        folder = self._folder / f"launch-{len(self.sizes)}"
        control = ControlDirectory(folder / "control")
        control.path.mkdir(parents=True)
        order = {
            "path": str(SCRIPT),
            "args": [*self._args, "--epochs", str(EPOCHS)],
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
                begun = sum(each.kind == "start" for each in control.notices())
                due = time.monotonic() + delay if begun == size else None
            elif late and due is not None and time.monotonic() > due:
                late = False
                last = [each for each in control.notices() if each.rank == victim][-1]
                with suppress(ProcessLookupError):
                    os.kill(last.pid, signal.SIGKILL)
                    killed.append({"kind": "kill-any-time", "rank": victim, "step": last.step})

        done = run_attempt(order, folder, self.home, LIMIT, perform, look)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # whose parents were killed
                pass
        happened = [fault for fault in faults if fault.number in control.injected()]
        killed += [{**asdict(each), "at": general(each.operation, each.step)} for each in happened]
        self.kills += [{**each, "size": size, "launch": len(self.sizes)} for each in killed]
        return done.code, done.output, list(control.notices())

    def _check(self, code: int, output: str, notices: Sequence[Notice], latest: int, kills: int) -> str:
        """Return the problem of a launch that began after checkpoint `latest` and `kills` kills."""
        attempts: dict[int, list[int]] = {}
        for each in notices:
            if each.rank == 0 and each.kind in ("start", "step"):
                attempts.setdefault(each.pid, []).extend([each.step] * (each.kind == "step"))
        self.taken += sum(map(len, attempts.values()))
        self.corrupt += len(damaged(self.checkpoints))
        first = next((steps[0] for steps in [*attempts.values()][:1] if steps), latest + 1)
        problems = {
            f"did not end in {LIMIT:g} s": code == 124,
            f"failed without a kill, with {code}": code and len(self.kills) == kills,
            f"resumed at step {first} after checkpoint {latest}": first != latest + 1,
            "skipped a damaged checkpoint": "skipped" in output,
            "was one too many": len(self.sizes) > MOST_LAUNCHES,
        }
        return next((text for text, found in problems.items() if found), "")


class StrategyStorm:
    """The trainings of one strategy, and its undisturbed trainings by number of ranks."""

    def __init__(self, folder: Path, key: str, lines: Sequence[dict[str, Any]]) -> None:
        self._folder, self.key, self.case = folder / key, key, CASES[key]
        self._kills = [kill for each in lines if each["strategy"] == key for kill in each["kills"]]
        self.known: dict[int, Operations] = {}
        self.calm: dict[int, DisturbedTraining] = {}

    def survey(self, size: int) -> None:
        """Train undisturbed on a number of ranks."""
        calm = DisturbedTraining(self._folder / f"calm-{size}", self.case.args, random.Random(0))
        code, output, notices = calm.launch(size, 0, [], False)
        if code:
            raise SystemExit(f"{self.case.name} on {size} ranks failed by itself:\n{output}")
        self.calm[size], self.known[size] = calm, Operations()
        self.known[size].add(notices, calm=True)
        mine = [kill for kill in self._kills if kill.get("at") and kill["size"] == size]
        self.known[size].kills.update((kill["rank"], kill["at"]) for kill in mine)

    def run(self, number: int, seed: str) -> dict[str, Any]:
        """Run one training under kills and return its line of the results."""
        draw = random.Random(seed)
        fixed = self.case.fixed or (not self.case.bits and draw.random() < 0.5)
        sizes = (draw.choice(self.case.sizes),) if fixed else self.case.sizes
        for size in sizes:
            if size not in self.calm:
                self.survey(size)
        training = DisturbedTraining(self._folder / str(number), self.case.args, draw)
        training.run(self.known, sizes)
        line = {"training": number, "strategy": self.key, "seed": seed, "ranks": training.sizes}
        for name in ("kills", "taken", "corrupt", "problem"):
            line[name] = getattr(training, name)
        if not training.problem:
            line |= self._compare(training, sizes)
        if not line["problem"]:
            shutil.rmtree(self._folder / str(number))
        return line

    def _compare(self, training: DisturbedTraining, sizes: Sequence[int]) -> dict[str, Any]:
        calm = self.calm[sizes[0]]
        repeated, missed = count_samples(training.home, EPOCHS)
        identical = digest_end(training.home) == digest_end(calm.home)
        (mine, end), (other, expected) = (
            latest_checkpoint(each.checkpoints) or (Path(), None) for each in (training, calm)
        )
        assert end is not None
        assert expected is not None
        compared = compare(inspect_checkpoint(other), inspect_checkpoint(mine))
        # The rest are the number of ranks and their random generators.
        plain = [each for each in compared.plain if each[0].startswith("state/")]
        changed = [each for each in compared.changed if each.name.startswith("state/")]
        difference = max((each.relative for each in changed), default=0.0)
        identical = identical or (self.case.bits and not changed and not plain)
        exact = len(sizes) == 1 or self.case.bits
        problems = {
            f"{repeated} samples repeated, {missed} missed": repeated or missed,
            f"{training.corrupt} corrupt checkpoints": training.corrupt,
            f"it ended at step {end.step}": end.step != expected.step,
            f"the end differs by {difference:.1e}, and in {plain}": (exact and not identical)
            or difference > ROUNDING
            or plain,
        }
        return {
            "needed": expected.step,
            "samples": repeated + missed,
            "identical": identical,
            "promised": exact,
            "difference": difference,
            "problem": next((text for text, found in problems.items() if found), ""),
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
    sums = {key: sum(each[key] for each in ended) for key in ("taken", "needed", "samples")}
    return {
        "strategy": name,
        "kills": len(kills),
        "in saves": sum(kill["kind"] == "kill-in-save" for _, kill in kills),
        "places": len({(s, k["size"], k["rank"], k["at"]) for s, k in kills if k.get("at")}),
        **sums,
        "corrupt": sum(each["corrupt"] for each in lines),
        "bits": f"{sum(exact)}/{len(exact)}",
        "equal": f"{sum(close)}/{len(close)}",
    }


def run_storms(given: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Run trainings until there are enough kills, or the time is over."""
    shutil.rmtree(given.scratch, ignore_errors=True)
    storms = {key: StrategyStorm(given.scratch, key, lines) for key in given.strategies}
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
        print(number, key, len(line["kills"]), "kills;", line["problem"] or "equal", flush=True)


def main() -> None:
    files = {"results": Path("build/chaos.jsonl"), "scratch": Path("build/chaos")}
    given = parse(__doc__, strategies=CASES, kills=1000, minutes=24 * 60.0, seed=0, **files)
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
